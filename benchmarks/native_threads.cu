// Copy leaves from pageable memory to the device, in chunks, with native threads: the limit for a packer without Python.
//
// Prints a line for each case, way and number of threads: case, way, threads, then the milliseconds of each repetition.
// Ways: "bus" copies packed bytes; the others also pack. "spinning" threads poll for work, as OpenMP's do; "sleeping"
// threads are woken for each batch; "non-temporal" threads also sleep, and write with stores that bypass the caches.
// Built and run by native_threads.py.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

constexpr size_t MiB = 1 << 20, PIECE = MiB, HUGE_PAGE = 2 * MiB;
constexpr int MAX_CHUNKS = 16;

struct Piece {
  char *to;
  const char *from;
  size_t bytes;
  int chunk;
};

enum class Way { bus, spinning, sleeping, non_temporal };
const char *names[] = {"bus", "spinning", "sleeping", "non-temporal"};

static double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void check(cudaError_t status) {
  if (status != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
    std::exit(1);
  }
}

__attribute__((target("avx2"))) static void copy_past_caches(char *to, const char *from, size_t bytes) {
  size_t done = 0;
  for (; done + 64 <= bytes; done += 64) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)(from + done));
    const __m256i high = _mm256_loadu_si256((const __m256i *)(from + done + 32));
    _mm256_stream_si256((__m256i *)(to + done), low);
    _mm256_stream_si256((__m256i *)(to + done + 32), high);
  }
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
}

// Threads, including the calling one, that take pieces one after the other.
class Packer {
 public:
  Packer(int threads, Way way) : way_(way) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Packer() {
    begin(-1);
    for (auto &helper : helpers_) helper.join();
  }

  // Packs, and calls `packed(chunk)` for each chunk, in order, as soon as it is.
  template <typename F>
  void pack(const std::vector<Piece> &pieces, int chunks, F packed) {
    while (busy_.load() > 0) _mm_pause();
    pieces_ = &pieces;
    for (int chunk = 0; chunk < chunks; ++chunk) left_[chunk].store(0);
    for (const Piece &piece : pieces) ++left_[piece.chunk];
    turn_.store(0);
    begin(1);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      while (left_[chunk].load() > 0)
        if (!step()) _mm_pause();
      packed(chunk);
    }
  }

 private:
  void begin(int by) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (by < 0) closing_ = true;
      ++round_;
    }
    if (way_ != Way::spinning) called_.notify_all();
  }

  void help() {
    int seen = 0;
    while (true) {
      if (way_ == Way::spinning) {
        while (round_.load() == seen) _mm_pause();
      } else {
        std::unique_lock<std::mutex> lock(mutex_);
        called_.wait(lock, [&] { return round_.load() != seen; });
      }
      seen = round_.load();
      if (closing_) return;
      ++busy_;
      while (step()) {
      }
      --busy_;
    }
  }

  bool step() {
    const size_t turn = turn_.fetch_add(1);
    if (turn >= pieces_->size()) return false;
    const Piece &piece = (*pieces_)[turn];
    if (way_ == Way::non_temporal)
      copy_past_caches(piece.to, piece.from, piece.bytes);
    else
      std::memcpy(piece.to, piece.from, piece.bytes);
    --left_[piece.chunk];
    return true;
  }

  const Way way_;
  const std::vector<Piece> *pieces_ = nullptr;
  std::atomic<size_t> turn_{size_t(1) << 40};
  std::atomic<int> left_[MAX_CHUNKS] = {}, round_{0}, busy_{0};
  std::atomic<bool> closing_{false};
  std::mutex mutex_;
  std::condition_variable called_;
  std::vector<std::thread> helpers_;
};

static char *registered(size_t bytes) {
  void *start = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *slab = (char *)(((size_t)start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
  madvise(slab, bytes, MADV_HUGEPAGE);
  std::memset(slab, 1, bytes);
  check(cudaHostRegister(slab, bytes, cudaHostRegisterPortable));
  return slab;
}

// native_threads REPEATS CASE LEAVES BYTES [CASE LEAVES BYTES]...
int main(int count, char **words) {
  const int repeats = std::atoi(words[1]);
  for (int word = 2; word + 2 < count; word += 3) {
    const int leaves = std::atoi(words[word + 1]);
    const size_t bytes = std::strtoull(words[word + 2], nullptr, 10), total = bytes * leaves;
    const int chunks = std::max<int>(1, std::min<size_t>(MAX_CHUNKS, total / (4 * MiB)));
    char *slab = registered(total), *device;
    check(cudaMalloc((void **)&device, total));
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<std::vector<char>> memory;
    for (int leaf = 0; leaf < leaves; ++leaf) memory.emplace_back(bytes, char(leaf + 1));
    std::vector<Piece> pieces;
    std::vector<size_t> ends(chunks, 0);
    size_t offset = 0;
    for (const auto &leaf : memory)
      for (size_t cut = 0; cut < bytes; cut += PIECE) {
        const int chunk = int(offset * chunks / total);
        pieces.push_back({slab + offset, leaf.data() + cut, std::min(PIECE, bytes - cut), chunk});
        offset += pieces.back().bytes;
        ends[chunk] = offset;
      }
    const auto copy = [&](int chunk) {
      const size_t start = chunk ? ends[chunk - 1] : 0;
      check(cudaMemcpyAsync(device + start, slab + start, ends[chunk] - start, cudaMemcpyHostToDevice, stream));
    };
    for (Way way : {Way::bus, Way::spinning, Way::sleeping, Way::non_temporal})
      for (int threads : {1, 4, 6, 8, 12, 16}) {
        if ((way == Way::bus) != (threads == 1)) continue;
        Packer packer(threads, way);
        std::printf("%s %s %d", words[word], names[int(way)], threads);
        for (int repeat = -3; repeat < repeats; ++repeat) {
          const double began = now_ms();
          if (way == Way::bus)
            for (int chunk = 0; chunk < chunks; ++chunk) copy(chunk);
          else
            packer.pack(pieces, chunks, copy);
          check(cudaStreamSynchronize(stream));
          if (repeat >= 0) std::printf(" %.4f", now_ms() - began);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    std::vector<char> back(total);
    check(cudaMemcpy(back.data(), device, total, cudaMemcpyDeviceToHost));
    offset = 0;
    for (const auto &leaf : memory) {
      if (std::memcmp(back.data() + offset, leaf.data(), bytes) != 0) {
        std::fprintf(stderr, "%s: other bytes arrived\n", words[word]);
        return 1;
      }
      offset += bytes;
    }
    check(cudaHostUnregister(slab));
    check(cudaFree(device));
    check(cudaStreamDestroy(stream));
  }
  return 0;
}
