"""What it takes to work with the libraries that people train with: one small module for each."""
