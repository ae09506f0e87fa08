#include "fold.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "words.h"

// Compiled twice where the loader can choose: multiplying and taking minima of eight 32-bit
// numbers at once needs AVX2. The results are the same.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define HEADRACE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define HEADRACE_WIDE
#endif

namespace headrace::text {
namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15u;
constexpr uint64_t kShingleBase = 0xD6E8FEB86659FD93u;
constexpr int64_t kSegment = int64_t{1} << 20;  // bytes; only words of this length are cut

bool is_white(uint8_t byte) {
  return byte == ' ' || (byte >= 9 && byte <= 13) || (byte >= 0x1C && byte <= 0x1F);
}

bool in_word(uint8_t byte) {
  return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') ||
         (byte >= 'a' && byte <= 'z') || byte >= 0x80;
}

// First bytes of kana, CJK, Hangul and everything in four bytes: characters as words.
bool stands_alone(uint8_t byte) {
  return (byte >= 0xE3 && byte < 0xEE) || (byte >= 0xF0 && byte < 0xF5);
}

uint32_t finalised(uint32_t hash) {  // MurmurHash3's
  hash ^= hash >> 16;
  hash *= 0x85EBCA6Bu;
  hash ^= hash >> 13;
  hash *= 0xC2B2AE35u;
  return hash ^ (hash >> 16);
}

HEADRACE_WIDE void take_minima(const uint32_t* hashes, size_t num_hashes, const uint32_t* a,
                               const uint32_t* b, size_t num, uint32_t* best) {
  constexpr size_t kTogether = 16;
  for (size_t first = 0; first < num; first += kTogether) {
    const size_t count = std::min(kTogether, num - first);
    uint32_t a_here[kTogether] = {}, b_here[kTogether] = {}, best_here[kTogether];
    std::copy_n(a + first, count, a_here);
    std::copy_n(b + first, count, b_here);
    std::fill_n(best_here, kTogether, ~uint32_t{0});
    for (size_t i = 0; i < num_hashes; ++i) {
      const uint32_t hash = hashes[i];
      for (size_t j = 0; j < kTogether; ++j) {
        const uint32_t value = a_here[j] * hash + b_here[j];
        best_here[j] = value < best_here[j] ? value : best_here[j];
      }
    }
    for (size_t j = 0; j < count; ++j) {
      best[first + j] = std::min(best[first + j], best_here[j]);
    }
  }
}

}  // namespace

Folder::Folder() : index_(kNumCodePoints, 0), foldings_(1) {}

void Folder::add(uint32_t code, const std::string& folded) {
  if (code < 0x80 || code >= kNumCodePoints || foldings_.size() > 0xFFFF) {
    throw std::invalid_argument("no character to fold, or too many");
  }
  index_[code] = static_cast<uint16_t>(foldings_.size());
  foldings_.push_back(folded);
}

void Folder::fold(const uint8_t* begin, const uint8_t* end, std::vector<uint8_t>& folded,
                  std::vector<uint8_t>* stripped) const {
  const size_t first = folded.size();
  for (const uint8_t* p = begin; p < end;) {
    if (*p < 0x80) {
      const uint8_t* stop = p;
      while (stop < end && *stop < 0x80) {
        ++stop;
      }
      const size_t at = folded.size(), count = static_cast<size_t>(stop - p);
      folded.resize(at + count);
      for (size_t i = 0; i < count; ++i) {
        const uint8_t byte = p[i];
        folded[at + i] = static_cast<uint8_t>(byte | (byte >= 'A' && byte <= 'Z' ? 0x20 : 0));
      }
      p = stop;
      continue;
    }
    const uint8_t* start = p;
    const uint16_t index = index_[next_code(p)];
    if (index == 0) {
      folded.insert(folded.end(), start, p);
    } else {
      folded.insert(folded.end(), foldings_[index].begin(), foldings_[index].end());
    }
  }
  if (stripped != nullptr) {
    const size_t at = stripped->size(), count = folded.size() - first;
    stripped->resize(at + count);
    uint8_t* out = stripped->data() + at;
    const uint8_t* in = folded.data() + first;
    for (size_t i = 0; i < count; ++i) {
      *out = in[i];
      out += is_white(in[i]) ? 0 : 1;
    }
    stripped->resize(static_cast<size_t>(out - stripped->data()));
  }
}

MinHasher::MinHasher(int width, std::vector<uint32_t> a, std::vector<uint32_t> b,
                     std::array<uint64_t, 256> values)
    : width_(static_cast<size_t>(width)), a_(std::move(a)), b_(std::move(b)), values_(values) {
  if (width < 1 || a_.size() != b_.size()) {
    throw std::invalid_argument("shingles have words, permutations two numbers");
  }
}

void MinHasher::sign(const uint8_t* begin, const uint8_t* end, uint32_t* signature) {
  words_.clear();
  for (const uint8_t* start = begin; start < end;) {
    const uint8_t* stop = end - start > kSegment ? start + kSegment : end;
    if (stop < end) {
      const uint8_t* space = stop - 1;
      while (space > start && *space != ' ') {
        --space;
      }
      stop = space > start ? space : stop;
    }
    for (const uint8_t* p = start; p < stop;) {
      if (!in_word(*p)) {
        ++p;
        continue;
      }
      uint64_t hash = 0, power = 1;
      do {
        hash += values_[*p] * power;
        power *= kBase;
        ++p;
      } while (p < stop && in_word(*p) && !stands_alone(*p));
      words_.push_back(hash ^ (hash >> 32));
    }
    start = stop;
  }
  std::fill_n(signature, a_.size(), ~uint32_t{0});
  if (words_.empty()) {
    return;
  }
  const size_t width = std::min(width_, words_.size());
  std::vector<uint32_t> hashes(words_.size() - width + 1);
  for (size_t i = 0; i < hashes.size(); ++i) {
    uint64_t mixed = 0;
    for (size_t j = 0; j < width; ++j) {
      mixed = mixed * kShingleBase + words_[i + j];
    }
    mixed ^= mixed >> 29;
    mixed *= kBase;
    hashes[i] = finalised(static_cast<uint32_t>(mixed >> 32));
  }
  take_minima(hashes.data(), hashes.size(), a_.data(), b_.data(), a_.size(), signature);
}

}  // namespace headrace::text
