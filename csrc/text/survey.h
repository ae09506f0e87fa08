// One scan over a text for what the checks ask of every document: page furniture, repeated
// lines, its language, and whether a later year or a dated name stands in it at all.
//
// What is looked for (cues, names, function words, scripts) comes from Python, whose plain
// functions give the same answers: src/headrace/corpus/checks.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "words.h"

namespace headrace::text {

struct Findings {
  int64_t chars;      // characters of the text
  int64_t furniture;  // of them in lines with a cue, and in lines that repeat
  int32_t language;   // index of the languages given; -1: none
  bool has_year, has_name;
};

struct Script {
  uint32_t low, high;
  int32_t language;
};

struct Languages {
  int32_t num;        // languages that have words; index 0 is tried first, alone
  int32_t japanese, cyrillic, russian, ukrainian;
  std::vector<Script> scripts;
  std::vector<uint32_t> ukrainian_letters;
};

class Surveyor {
 public:
  // `cues` are in ASCII lower case, of four bytes and more or of one character that is not ASCII;
  // `names` as they are written.
  Surveyor(std::vector<std::string> cues, std::vector<std::string> names, int first_year,
           int last_year, Languages languages);
  // A word in lower case and the languages (bits by index) that it is a function word of.
  void add_word(const std::string& word, uint32_t languages);
  void add_lower(uint32_t code, uint32_t lower);

  Findings survey(const uint8_t* begin, const uint8_t* end);

 private:
  struct Line {
    uint64_t hash;
    const uint8_t* begin;
    int64_t bytes, chars;
  };
  void mark(std::string_view beginning);
  bool marked(uint32_t folded) const {
    const uint32_t at = (folded * 0x9E3779B1u) >> 16;
    return (filter_[at >> 6] >> (at & 63) & 1) != 0;
  }
  bool is_year(const uint8_t* p, const uint8_t* end) const;
  bool is_name(const uint8_t* p, const uint8_t* end) const;
  bool is_cue(const uint8_t* p, const uint8_t* end) const;
  void scan_line(const uint8_t* begin, const uint8_t* end, const uint8_t* text_end, bool for_cues,
                 bool* has_cue, Findings* findings) const;
  int64_t repeated(const std::vector<Line>& lines);
  int32_t language(const uint8_t* begin, const uint8_t* end) const;
  int32_t by_script(const uint8_t* begin, const uint8_t* end, int64_t chars) const;
  uint32_t languages_of(std::string_view word) const;

  std::array<uint64_t, 1024> filter_{};  // hashes of four bytes that something may begin with
  std::vector<std::string> cues_, names_, short_cues_, short_names_;
  int first_year_, last_year_;
  Languages languages_;
  std::vector<std::pair<std::string, uint32_t>> words_;  // open addressing; "" is empty
  size_t num_words_ = 0;
  std::vector<uint16_t> lower_;
  std::vector<Line> lines_;
  std::vector<uint32_t> seen_;
};

}  // namespace headrace::text
