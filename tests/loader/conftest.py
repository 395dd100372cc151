import pytest


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def workers(request):
    return request.param
