// Case folding and fingerprints of texts: what fingerprints.py does on whole arrays, in one pass.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace headrace::text {

class Folder {
 public:
  Folder();
  // What a character folds to, where that is not itself; ASCII is known.
  void add(uint32_t code, const std::string& folded);
  // Appends the folded text, and the same without ASCII white space where `stripped` is given.
  void fold(const uint8_t* begin, const uint8_t* end, std::vector<uint8_t>& folded,
            std::vector<uint8_t>* stripped) const;

 private:
  std::vector<uint16_t> index_;  // by code point; 0: itself
  std::vector<std::string> foldings_;
};

// MinHash signatures of folded texts: shingles of `width` words, `a * h + b mod 2^32`.
class MinHasher {
 public:
  MinHasher(int width, std::vector<uint32_t> a, std::vector<uint32_t> b,
            std::array<uint64_t, 256> values);
  size_t num_permutations() const { return a_.size(); }
  void sign(const uint8_t* begin, const uint8_t* end, uint32_t* signature);

 private:
  size_t width_;
  std::vector<uint32_t> a_, b_;
  std::array<uint64_t, 256> values_;
  std::vector<uint64_t> words_;
};

}  // namespace headrace::text
