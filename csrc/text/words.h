// Cutting UTF-8 text into the words of a byte-level BPE tokenizer.
//
// A pre-tokenizer's expression is a list of rules, tried in order at every place; the first that
// matches takes its longest match, as its regular expression would. Which characters are letters,
// numbers, marks or spaces is told by Python, from the tokenizer library's own expressions:
// nothing here knows Unicode.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace headrace::text {

// Bits of a character's class. A character without kKnown has not been asked about yet.
enum : uint8_t {
  kLetter = 1,
  kNumber = 2,
  kMark = 4,
  kSpace = 8,
  kNewline = 16,  // CR, LF
  kBlank = 32,    // U+0020
  kRefused = 64,  // texts with it go to the library
  kKnown = 128,
};

constexpr uint32_t kNumCodePoints = 0x110000;
constexpr uint8_t kNoOrder = 255;  // may join what stands before it: normalisation is not decided

struct Set {
  uint8_t bits;
  bool negated;
  bool has(uint8_t char_class) const { return ((char_class & bits) != 0) != negated; }
};

enum class Kind : int32_t {
  kRun = 0,            // one of `lead`, if any; up to `most` of `body`; then CR and LF
  kContraction = 1,    // 's 't 're 've 'm 'll 'd
  kAnyCaseContraction = 2,
  kToNewline = 3,      // \s*[\r\n]+
  kSpacesBefore = 4,   // \s+(?!\S)
};

struct Rule {
  Kind kind;
  bool has_lead;
  Set lead;
  Set body;
  int32_t most;  // 0: no limit
  bool takes_newlines;
};

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

class Classes {
 public:
  Classes();
  uint8_t at(uint32_t code) const { return classes_[code]; }
  uint8_t ascii(uint8_t byte) const { return classes_[byte]; }
  // Canonical combining class, or kNoOrder.
  uint8_t order(uint32_t code) const { return orders_[code]; }
  void set(uint32_t code, uint8_t char_class, uint8_t order) {
    classes_[code] = static_cast<uint8_t>(char_class | kKnown);
    orders_[code] = order;
  }

 private:
  // From calloc: pages of scripts that never come stay untouched.
  std::unique_ptr<uint8_t[], FreeMemory> classes_;
  std::unique_ptr<uint8_t[], FreeMemory> orders_;
};

// The code point at `p`; `p` moves behind it. The text is valid UTF-8.
inline uint32_t next_code(const uint8_t*& p) {
  const uint8_t first = *p++;
  if (first < 0x80) {
    return first;
  }
  if (first < 0xE0) {
    return (first & 0x1Fu) << 6 | (*p++ & 0x3Fu);
  }
  if (first < 0xF0) {
    const uint32_t code = (first & 0x0Fu) << 12 | (p[0] & 0x3Fu) << 6 | (p[1] & 0x3Fu);
    p += 2;
    return code;
  }
  const uint32_t code =
      (first & 0x07u) << 18 | (p[0] & 0x3Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
  p += 3;
  return code;
}

bool is_ascii(const uint8_t* begin, const uint8_t* end);

class Cutter {
 public:
  Cutter(std::vector<Rule> rules, bool digits_alone);
  Classes& classes() { return classes_; }
  const Classes& classes() const { return classes_; }

  // Whether the rules apply: only known characters, none that is refused, and, where
  // `normalised` is asked for, plainly in normalisation form C.
  bool accepts(const uint8_t* begin, const uint8_t* end, bool normalised) const;

  // The end of the word at `p`; `limit` is the end of what the expression sees.
  const uint8_t* word_end(const uint8_t* p, const uint8_t* limit) const;

  // The end of what the expression sees from `p`: the text's, or the next digit.
  const uint8_t* limit_from(const uint8_t* p, const uint8_t* end) const;

 private:
  uint8_t class_at(const uint8_t* p, const uint8_t*& next) const {
    next = p;
    return classes_.at(next_code(next));
  }
  const uint8_t* run(const Rule& rule, const uint8_t* p, const uint8_t* limit) const;
  const uint8_t* match(const Rule& rule, const uint8_t* p, const uint8_t* limit) const;

  std::vector<Rule> rules_;
  bool digits_alone_;
  Classes classes_;
};

}  // namespace headrace::text
