#include "survey.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace headrace::text {
namespace {

constexpr int64_t kLongestLine = 240;    // characters; a longer one is a page in one line
constexpr size_t kFewLines = 8;
constexpr int64_t kSampleChars = 1200;
constexpr int kSampleWords = 100;
constexpr size_t kLongestWord = 16;      // bytes; function words are short
constexpr uint32_t kLowered = 0x2130;    // code points with a lower case among the words' letters
constexpr uint32_t kFirstForeign = 0x370;

uint32_t folded4(const uint8_t* p) {
  uint32_t piece;
  std::memcpy(&piece, p, 4);
  return piece | 0x20202020u;
}

uint8_t lower(uint8_t byte) { return byte >= 'A' && byte <= 'Z' ? byte | 0x20 : byte; }

int64_t count_chars(const uint8_t* begin, const uint8_t* end) {
  int64_t continued = 0;
  for (const uint8_t* p = begin; p < end; ++p) {
    continued += (*p & 0xC0) == 0x80;
  }
  return end - begin - continued;
}

uint64_t hash_bytes(const uint8_t* p, size_t left) {
  uint64_t hash = left * 0xD6E8FEB86659FD93u;
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t piece;
    std::memcpy(&piece, p, 8);
    hash = (hash ^ piece) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  uint64_t piece = 0;
  std::memcpy(&piece, p, left);
  hash = (hash ^ piece) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

// White space as Python's str.split knows it.
bool is_white(uint32_t code) {
  if (code < 0x80) {
    return (code >= 9 && code <= 13) || (code >= 0x1C && code <= 0x20);
  }
  return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
         code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

void append(char*& out, uint32_t code) {
  if (code < 0x80) {
    *out++ = static_cast<char>(code);
  } else if (code < 0x800) {
    *out++ = static_cast<char>(0xC0 | code >> 6);
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    *out++ = static_cast<char>(0xE0 | code >> 12);
    *out++ = static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  } else {
    *out++ = static_cast<char>(0xF0 | code >> 18);
    *out++ = static_cast<char>(0x80 | (code >> 12 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  }
}

bool starts(const uint8_t* p, const uint8_t* end, const std::string& with) {
  return static_cast<size_t>(end - p) >= with.size() &&
         std::memcmp(p, with.data(), with.size()) == 0;
}

bool holds(const uint8_t* begin, const uint8_t* end, const std::string& what) {
  const std::string_view text(reinterpret_cast<const char*>(begin),
                              static_cast<size_t>(end - begin));
  return text.find(what) != std::string_view::npos;
}

}  // namespace

Surveyor::Surveyor(std::vector<std::string> cues, std::vector<std::string> names, int first_year,
                   int last_year, Languages languages)
    : first_year_(first_year),
      last_year_(last_year),
      languages_(std::move(languages)),
      words_(1 << 12),
      lower_(kLowered) {
  for (size_t code = 0; code < lower_.size(); ++code) {
    lower_[code] = static_cast<uint16_t>(code);
  }
  for (std::string& cue : cues) {
    (cue.size() < 4 ? short_cues_ : cues_).push_back(std::move(cue));
  }
  for (std::string& name : names) {
    (name.size() < 4 ? short_names_ : names_).push_back(std::move(name));
  }
  for (const auto& some : {cues_, names_}) {
    for (const std::string& text : some) {
      mark(text);
    }
  }
  for (int year = first_year; year <= last_year; ++year) {
    mark(std::to_string(year));
  }
}

void Surveyor::mark(std::string_view beginning) {
  const uint32_t folded = folded4(reinterpret_cast<const uint8_t*>(beginning.data()));
  const uint32_t at = (folded * 0x9E3779B1u) >> 16;
  filter_[at >> 6] |= uint64_t{1} << (at & 63);
}

void Surveyor::add_word(const std::string& word, uint32_t languages) {
  if (word.empty() || word.size() > kLongestWord || 2 * ++num_words_ > words_.size()) {
    throw std::invalid_argument("a function word is too long, or there are too many");
  }
  size_t at = hash_bytes(reinterpret_cast<const uint8_t*>(word.data()), word.size());
  for (at &= words_.size() - 1; !words_[at].first.empty(); at = (at + 1) & (words_.size() - 1)) {
  }
  words_[at] = {word, languages};
}

void Surveyor::add_lower(uint32_t code, uint32_t lower) {
  if (code >= kLowered || lower >= kLowered) {
    throw std::invalid_argument("a letter outside the table");
  }
  lower_[code] = static_cast<uint16_t>(lower);
}

uint32_t Surveyor::languages_of(std::string_view word) const {
  size_t at = hash_bytes(reinterpret_cast<const uint8_t*>(word.data()), word.size());
  for (at &= words_.size() - 1; !words_[at].first.empty(); at = (at + 1) & (words_.size() - 1)) {
    if (words_[at].first == word) {
      return words_[at].second;
    }
  }
  return 0;
}

bool Surveyor::is_year(const uint8_t* p, const uint8_t* end) const {
  int year = 0;
  if (end - p < 4) {
    return false;
  }
  for (int i = 0; i < 4; ++i) {
    if (p[i] < '0' || p[i] > '9') {
      return false;
    }
    year = 10 * year + (p[i] - '0');
  }
  return year >= first_year_ && year <= last_year_;
}

bool Surveyor::is_name(const uint8_t* p, const uint8_t* end) const {
  return std::any_of(names_.begin(), names_.end(),
                     [&](const std::string& name) { return starts(p, end, name); });
}

bool Surveyor::is_cue(const uint8_t* p, const uint8_t* end) const {
  for (const std::string& cue : cues_) {
    if (static_cast<size_t>(end - p) < cue.size()) {
      continue;
    }
    size_t i = 0;
    while (i < cue.size() && lower(p[i]) == static_cast<uint8_t>(cue[i])) {
      ++i;
    }
    if (i == cue.size()) {
      return true;
    }
  }
  return false;
}

void Surveyor::scan_line(const uint8_t* begin, const uint8_t* end, const uint8_t* text_end,
                         bool for_cues, bool* has_cue, Findings* findings) const {
  bool cue = false;
  // Names may go on behind the line's end: four bytes are read from every place of the line.
  const uint8_t* last = text_end - begin < 4 ? begin : std::min(end, text_end - 3);
  for (const uint8_t* p = begin; p < last; ++p) {
    if (!marked(folded4(p))) {
      continue;
    }
    findings->has_year = findings->has_year || is_year(p, end);
    findings->has_name = findings->has_name || is_name(p, text_end);
    cue = cue || (for_cues && is_cue(p, end));
  }
  if (for_cues && !cue) {
    cue = std::any_of(short_cues_.begin(), short_cues_.end(),
                      [&](const std::string& some) { return holds(begin, end, some); });
  }
  *has_cue = cue;
}

// Characters of lines beyond the first of each.
int64_t Surveyor::repeated(const std::vector<Line>& lines) {
  size_t size = 16;
  while (size < 2 * lines.size()) {
    size *= 2;
  }
  seen_.assign(size, 0);
  int64_t count = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const Line& line = lines[i];
    size_t at = line.hash & (size - 1);
    for (; seen_[at] != 0; at = (at + 1) & (size - 1)) {
      const Line& other = lines[seen_[at] - 1];
      if (other.hash == line.hash && other.bytes == line.bytes &&
          std::memcmp(other.begin, line.begin, static_cast<size_t>(line.bytes)) == 0) {
        count += line.chars;
        break;
      }
    }
    if (seen_[at] == 0) {
      seen_[at] = static_cast<uint32_t>(i + 1);
    }
  }
  return count;
}

Findings Surveyor::survey(const uint8_t* begin, const uint8_t* end) {
  Findings findings{0, 0, -1, false, false};
  if (begin == end) {
    return findings;
  }
  lines_.clear();
  const bool ascii = is_ascii(begin, end);
  for (const uint8_t* p = begin;;) {
    const void* found = std::memchr(p, '\n', static_cast<size_t>(end - p));
    const uint8_t* stop = found != nullptr ? static_cast<const uint8_t*>(found) : end;
    const int64_t chars = ascii ? stop - p : count_chars(p, stop);
    bool has_cue = false;
    scan_line(p, stop, end, chars <= kLongestLine, &has_cue, &findings);
    findings.furniture += has_cue ? chars : 0;
    findings.chars += chars;
    lines_.push_back(Line{hash_bytes(p, static_cast<size_t>(stop - p)), p, stop - p, chars});
    if (stop == end) {
      break;
    }
    ++findings.chars;
    p = stop + 1;
  }
  if (lines_.size() > kFewLines) {
    findings.furniture += repeated(lines_);
  }
  findings.has_name = findings.has_name ||
                      std::any_of(short_names_.begin(), short_names_.end(),
                                  [&](const std::string& name) { return holds(begin, end, name); });
  findings.language = language(begin, end);
  return findings;
}

int32_t Surveyor::language(const uint8_t* begin, const uint8_t* end) const {
  int64_t chars = 0;
  const uint8_t* stop = begin;
  if (end - begin > kSampleChars || !is_ascii(begin, end)) {
    while (stop < end && chars < kSampleChars) {
      next_code(stop);
      ++chars;
    }
  } else {
    stop = end;
    chars = end - begin;
  }
  // Other scripts take two bytes a character and more.
  if (4 * (stop - begin) > 5 * chars) {
    const int32_t script = by_script(begin, stop, chars);
    if (script >= 0) {
      return script;
    }
  }
  std::array<int, 32> scores{};
  int num_words = 0;
  char word[kLongestWord + 4];
  char* out = word;
  bool inside = false;
  const auto finish = [&] {
    if (!inside) {
      return;
    }
    ++num_words;
    if (out <= word + kLongestWord) {
      uint32_t found = languages_of(std::string_view(word, static_cast<size_t>(out - word)));
      for (; found != 0; found &= found - 1) {
        ++scores[static_cast<size_t>(__builtin_ctz(found))];
      }
    }
    inside = false;
    out = word;
  };
  for (const uint8_t* p = begin; p < stop && num_words < kSampleWords;) {
    const uint32_t code = next_code(p);
    if (is_white(code)) {
      finish();
      continue;
    }
    inside = true;
    if (out <= word + kLongestWord) {  // longer ones are no function words
      append(out, code < kLowered ? lower_[code] : code);
    }
  }
  if (num_words < kSampleWords) {
    finish();
  }
  if (4 * scores[0] > num_words) {
    return 0;
  }
  int32_t best = 0;
  for (int32_t i = 1; i < languages_.num; ++i) {
    best = scores[static_cast<size_t>(i)] > scores[static_cast<size_t>(best)] ? i : best;
  }
  const int score = scores[static_cast<size_t>(best)];
  return score < 2 || score < 0.06 * num_words ? -1 : best;
}

int32_t Surveyor::by_script(const uint8_t* begin, const uint8_t* end, int64_t chars) const {
  std::array<int64_t, 64> counts{};
  int64_t num_foreign = 0;
  bool is_ukrainian = false;
  for (const uint8_t* p = begin; p < end;) {
    const uint32_t code = next_code(p);
    if (code < kFirstForeign) {
      continue;
    }
    for (const Script& script : languages_.scripts) {
      if (script.low <= code && code <= script.high) {
        ++counts[static_cast<size_t>(script.language)];
        ++num_foreign;
        break;
      }
    }
    is_ukrainian = is_ukrainian ||
                   std::find(languages_.ukrainian_letters.begin(),
                             languages_.ukrainian_letters.end(),
                             code) != languages_.ukrainian_letters.end();
  }
  if (num_foreign * 4 < chars) {
    return -1;
  }
  if (counts[static_cast<size_t>(languages_.japanese)] * 10 > num_foreign) {
    return languages_.japanese;  // kana among Han characters
  }
  int32_t best = languages_.scripts.front().language;
  for (const Script& script : languages_.scripts) {
    if (counts[static_cast<size_t>(script.language)] > counts[static_cast<size_t>(best)]) {
      best = script.language;
    }
  }
  if (best == languages_.cyrillic) {
    return is_ukrainian ? languages_.ukrainian : languages_.russian;
  }
  return best;
}

}  // namespace headrace::text
