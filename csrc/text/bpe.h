// Byte-level BPE: the ids of words, remembered, and merged as the tokenizer library merges.
//
// The invariant: the ids of a text are those the library gives, or the text is refused. Memory is
// bounded: what is remembered is dropped when it has grown to its limit.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "words.h"

namespace headrace::text {

// Open addressing over 64-bit keys; `kNone` is no key. Made once, then only read.
class PairTable {
 public:
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  void fill(const int32_t* left, const int32_t* right, const int32_t* merged, int64_t num);
  const Merge* find(int32_t left, int32_t right) const;

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  std::vector<uint64_t> keys_;
  std::vector<Merge> merges_;
  uint64_t mask_ = 0;
};

// Ids of words by their bytes.
class WordTable {
 public:
  WordTable();
  // The ids and their number, or nullptr.
  const int32_t* find(std::string_view word, uint64_t hash, int32_t* num) const;
  void add(std::string_view word, uint64_t hash, const int32_t* ids, int32_t num);

 private:
  struct Entry {
    uint64_t hash = 0;
    uint32_t word = 0, ids = 0;  // offsets
    uint16_t length = 0, num = 0;  // length 0: empty
  };
  void clear();
  void grow();

  std::vector<Entry> entries_;
  std::vector<char> words_;
  std::vector<int32_t> ids_;
  uint64_t mask_ = 0;
  size_t num_ = 0;
};

class Encoder {
 public:
  Encoder(Cutter cutter, std::array<int32_t, 256> byte_ids, bool normalised);
  Cutter& cutter() { return cutter_; }
  PairTable& merges() { return merges_; }
  // Whole words that are tokens are taken without merging ("ignore_merges").
  void set_whole(std::unordered_map<std::string, int32_t> whole) { whole_ = std::move(whole); }
  // Ids before every text, and the one that ends it (once: also where the text's own is last).
  void set_around(std::vector<int32_t> before, int32_t end) {
    before_ = std::move(before);
    end_ = end;
  }
  // Texts that hold one of these go to the library.
  void set_added(std::vector<std::string> added) { added_ = std::move(added); }

  // Appends the ids of a text; false, and nothing appended, where it is refused.
  bool encode(const uint8_t* begin, const uint8_t* end, std::vector<int32_t>& out);

 private:
  bool holds_added(const uint8_t* begin, const uint8_t* end) const;
  void merge(std::string_view word);
  void merge_short();
  void merge_long();

  Cutter cutter_;
  std::array<int32_t, 256> byte_ids_;
  bool normalised_;
  PairTable merges_;
  WordTable words_;
  std::unordered_map<std::string, int32_t> whole_;
  std::vector<std::string> added_;
  std::vector<int32_t> before_;
  int32_t end_ = 0;
  std::vector<int32_t> symbols_;  // of the word being merged
};

}  // namespace headrace::text
