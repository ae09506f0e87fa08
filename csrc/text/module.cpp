// Python's door to the text passes: headrace.corpus._text.
//
// Takes the buffers of Arrow columns as they are and lets the GIL go. Only
// src/headrace/corpus/compiled.py calls this module; what it is told about characters and
// vocabularies comes from there.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "bpe.h"
#include "fold.h"
#include "survey.h"

namespace nb = nanobind;

namespace headrace::text {
namespace {

template <typename T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Result<T> as_array(std::vector<T> values) {
  auto* held = new std::vector<T>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Result<T>(held->data(), {held->size()}, owner);
}

// Texts of an Arrow column: text i is data[offsets[i]:offsets[i + 1]].
struct Texts {
  const uint8_t* data;
  const int64_t* offsets;
  int64_t num;

  Texts(const Flat<const uint8_t>& bytes, const Flat<const int64_t>& bounds)
      : data(bytes.data()),
        offsets(bounds.data()),
        num(static_cast<int64_t>(bounds.size()) - 1) {
    if (num < 0 || offsets[0] < 0 || offsets[num] > static_cast<int64_t>(bytes.size()) ||
        !std::is_sorted(offsets, offsets + num + 1)) {
      throw std::invalid_argument("offsets do not lie in the data");
    }
  }
  const uint8_t* begin(int64_t i) const { return data + offsets[i]; }
  const uint8_t* end(int64_t i) const { return data + offsets[i + 1]; }
};

// Rules as rows of int32: kind, has_lead, lead bits, lead negated, body bits, body negated,
// most, takes_newlines.
constexpr size_t kRuleColumns = 8;

std::vector<Rule> rules_from(const Flat<const int32_t>& packed) {
  if (packed.size() % kRuleColumns != 0) {
    throw std::invalid_argument("rules have eight columns");
  }
  std::vector<Rule> rules;
  for (size_t at = 0; at < packed.size(); at += kRuleColumns) {
    const int32_t* row = packed.data() + at;
    if (row[0] < 0 || row[0] > static_cast<int32_t>(Kind::kSpacesBefore)) {
      throw std::invalid_argument("no such kind of rule");
    }
    rules.push_back(Rule{static_cast<Kind>(row[0]), row[1] != 0,
                         Set{static_cast<uint8_t>(row[2]), row[3] != 0},
                         Set{static_cast<uint8_t>(row[4]), row[5] != 0}, row[6], row[7] != 0});
  }
  return rules;
}

Encoder make_encoder(const Flat<const int32_t>& rules, bool digits_alone,
                     const Flat<const int32_t>& byte_ids, const Flat<const int32_t>& left,
                     const Flat<const int32_t>& right, const Flat<const int32_t>& merged,
                     bool normalised, std::vector<std::string> added) {
  if (byte_ids.size() != 256 || left.size() != right.size() || left.size() != merged.size()) {
    throw std::invalid_argument("256 bytes have ids; merges have three columns");
  }
  std::array<int32_t, 256> ids;
  std::copy_n(byte_ids.data(), ids.size(), ids.begin());
  Encoder encoder(Cutter(rules_from(rules), digits_alone), ids, normalised);
  encoder.merges().fill(left.data(), right.data(), merged.data(),
                        static_cast<int64_t>(left.size()));
  if (std::any_of(added.begin(), added.end(), [](const auto& t) { return t.empty(); })) {
    throw std::invalid_argument("an added token is empty");
  }
  std::sort(added.begin(), added.end());
  encoder.set_added(std::move(added));
  return encoder;
}

void set_classes(Encoder& encoder, const Flat<const uint32_t>& codes,
                 const Flat<const uint8_t>& classes, const Flat<const uint8_t>& orders) {
  if (codes.size() != classes.size() || codes.size() != orders.size()) {
    throw std::invalid_argument("a class and an order for every character");
  }
  for (size_t i = 0; i < codes.size(); ++i) {
    if (codes.data()[i] >= kNumCodePoints) {
      throw std::invalid_argument("no such character");
    }
    encoder.cutter().classes().set(codes.data()[i], classes.data()[i], orders.data()[i]);
  }
}

// Blocks of 256 code points in which a character of the texts has no class yet.
std::vector<uint32_t> unknown_blocks(Encoder& encoder, const Flat<const uint8_t>& data,
                                     const Flat<const int64_t>& offsets) {
  const Texts texts(data, offsets);
  std::vector<uint32_t> blocks;
  nb::gil_scoped_release release;
  const uint8_t* p = texts.begin(0);
  const uint8_t* end = texts.num != 0 ? texts.end(texts.num - 1) : p;
  constexpr int64_t kStretch = 64;
  while (p < end) {
    if (end - p >= kStretch && is_ascii(p, p + kStretch)) {
      p += kStretch;
      continue;
    }
    for (const uint8_t* stop = p + std::min<int64_t>(kStretch, end - p); p < stop;) {
      const uint32_t code = next_code(p);
      if (code >= 0x80 && (encoder.cutter().classes().at(code) & kKnown) == 0 &&
          std::find(blocks.begin(), blocks.end(), code >> 8) == blocks.end()) {
        blocks.push_back(code >> 8);
      }
    }
  }
  return blocks;
}

// The ids of all texts, one after the other, and how many each has; -1: refused, and none.
std::pair<Result<int32_t>, Result<int64_t>> encode(Encoder& encoder,
                                                   const Flat<const uint8_t>& data,
                                                   const Flat<const int64_t>& offsets) {
  const Texts texts(data, offsets);
  std::vector<int32_t> ids;
  std::vector<int64_t> counts(static_cast<size_t>(texts.num));
  {
    nb::gil_scoped_release release;
    ids.reserve(static_cast<size_t>(texts.offsets[texts.num] - texts.offsets[0]) / 3 + 16);
    for (int64_t i = 0; i < texts.num; ++i) {
      const size_t before = ids.size();
      const bool taken = encoder.encode(texts.begin(i), texts.end(i), ids);
      counts[static_cast<size_t>(i)] = taken ? static_cast<int64_t>(ids.size() - before) : -1;
    }
  }
  return {as_array(std::move(ids)), as_array(std::move(counts))};
}

// For every text: characters, of them furniture, the language's index or -1, and bits: 1 where a
// year stands in it, 2 where a name does.
std::tuple<Result<int64_t>, Result<int64_t>, Result<int32_t>, Result<uint8_t>> survey(
    Surveyor& surveyor, const Flat<const uint8_t>& data, const Flat<const int64_t>& offsets) {
  const Texts texts(data, offsets);
  const auto num = static_cast<size_t>(texts.num);
  std::vector<int64_t> chars(num), furniture(num);
  std::vector<int32_t> languages(num);
  std::vector<uint8_t> holds(num);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < num; ++i) {
      const auto at = static_cast<int64_t>(i);
      const Findings found = surveyor.survey(texts.begin(at), texts.end(at));
      chars[i] = found.chars;
      furniture[i] = found.furniture;
      languages[i] = found.language;
      holds[i] = static_cast<uint8_t>((found.has_year ? 1 : 0) | (found.has_name ? 2 : 0));
    }
  }
  return {as_array(std::move(chars)), as_array(std::move(furniture)),
          as_array(std::move(languages)), as_array(std::move(holds))};
}

template <typename T>
void ends_at(std::vector<int64_t>& ends, const std::vector<T>& values) {
  ends.push_back(static_cast<int64_t>(values.size()));
}

// Folded texts and the same without ASCII white space, each as bytes and offsets (N + 1).
std::tuple<Result<uint8_t>, Result<int64_t>, Result<uint8_t>, Result<int64_t>> fold(
    Folder& folder, const Flat<const uint8_t>& data, const Flat<const int64_t>& offsets) {
  const Texts texts(data, offsets);
  std::vector<uint8_t> folded, stripped;
  std::vector<int64_t> folded_ends{0}, stripped_ends{0};
  {
    nb::gil_scoped_release release;
    const auto size = static_cast<size_t>(texts.offsets[texts.num] - texts.offsets[0]);
    folded.reserve(size + size / 16);
    stripped.reserve(size + size / 16);
    for (int64_t i = 0; i < texts.num; ++i) {
      folder.fold(texts.begin(i), texts.end(i), folded, &stripped);
      ends_at(folded_ends, folded);
      ends_at(stripped_ends, stripped);
    }
  }
  return {as_array(std::move(folded)), as_array(std::move(folded_ends)),
          as_array(std::move(stripped)), as_array(std::move(stripped_ends))};
}

// Signatures (N times P) of folded texts.
Result<uint32_t> sign(MinHasher& hasher, const Flat<const uint8_t>& data,
                      const Flat<const int64_t>& offsets) {
  const Texts texts(data, offsets);
  const size_t num = hasher.num_permutations();
  std::vector<uint32_t> signatures(static_cast<size_t>(texts.num) * num);
  {
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < texts.num; ++i) {
      hasher.sign(texts.begin(i), texts.end(i), signatures.data() + static_cast<size_t>(i) * num);
    }
  }
  return as_array(std::move(signatures));
}

MinHasher make_min_hasher(int width, std::vector<uint32_t> a, std::vector<uint32_t> b,
                          const Flat<const uint64_t>& values) {
  if (values.size() != 256) {
    throw std::invalid_argument("256 bytes have values");
  }
  std::array<uint64_t, 256> held;
  std::copy_n(values.data(), held.size(), held.begin());
  return MinHasher(width, std::move(a), std::move(b), held);
}

Surveyor make_surveyor(std::vector<std::string> cues, std::vector<std::string> names,
                       int first_year, int last_year, int num_languages,
                       const std::vector<std::pair<std::string, uint32_t>>& words,
                       const std::vector<std::pair<uint32_t, uint32_t>>& lower,
                       const std::vector<std::tuple<uint32_t, uint32_t, int32_t>>& scripts,
                       std::tuple<int32_t, int32_t, int32_t, int32_t> named,
                       std::vector<uint32_t> ukrainian_letters) {
  const auto [japanese, cyrillic, russian, ukrainian] = named;
  Languages languages{num_languages, japanese, cyrillic, russian, ukrainian, {},
                      std::move(ukrainian_letters)};
  bool fits = num_languages > 0 && num_languages <= 32 && !scripts.empty() && first_year >= 1000 &&
              last_year <= 9999 && japanese >= 0 && japanese < 64;
  for (const auto& [low, high, language] : scripts) {
    fits = fits && language >= 0 && language < 64;
    languages.scripts.push_back(Script{low, high, language});
  }
  for (const auto& texts : {cues, names}) {
    fits = fits && std::none_of(texts.begin(), texts.end(), [](const auto& t) { return t.empty(); });
  }
  if (!fits) {
    throw std::invalid_argument("more languages than bits, or nothing to look for");
  }
  Surveyor surveyor(std::move(cues), std::move(names), first_year, last_year,
                    std::move(languages));
  for (const auto& [word, some] : words) {
    surveyor.add_word(word, some);
  }
  for (const auto& [code, lowered] : lower) {
    surveyor.add_lower(code, lowered);
  }
  return surveyor;
}

}  // namespace
}  // namespace headrace::text

NB_MODULE(_text, m) {
  using namespace headrace::text;
  nb::set_leak_warnings(false);  // an encoder that lives as long as the process is no leak

  nb::class_<Encoder>(m, "Encoder")
      .def("set_classes", &set_classes, nb::arg("codes").noconvert(),
           nb::arg("classes").noconvert(), nb::arg("orders").noconvert())
      .def("set_whole",
           [](Encoder& encoder, const std::vector<nb::bytes>& words,
              const Flat<const int32_t>& ids) {
             if (words.size() != ids.size()) {
               throw std::invalid_argument("an id for every word");
             }
             std::unordered_map<std::string, int32_t> whole;
             for (size_t i = 0; i < words.size(); ++i) {
               whole[std::string(words[i].c_str(), words[i].size())] = ids.data()[i];
             }
             encoder.set_whole(std::move(whole));
           })
      .def("set_around",
           [](Encoder& encoder, std::vector<int32_t> before, int32_t end) {
             encoder.set_around(std::move(before), end);
           })
      .def("unknown_blocks", &unknown_blocks, nb::arg("data").noconvert(),
           nb::arg("offsets").noconvert())
      .def("encode", &encode, nb::arg("data").noconvert(), nb::arg("offsets").noconvert());
  m.def("make_encoder", &make_encoder, nb::arg("rules").noconvert(), nb::arg("digits_alone"),
        nb::arg("byte_ids").noconvert(), nb::arg("left").noconvert(), nb::arg("right").noconvert(),
        nb::arg("merged").noconvert(), nb::arg("normalised"), nb::arg("added"));

  nb::class_<Surveyor>(m, "Surveyor")
      .def("survey", &survey, nb::arg("data").noconvert(), nb::arg("offsets").noconvert());
  m.def("make_surveyor", &make_surveyor, nb::arg("cues"), nb::arg("names"), nb::arg("first_year"),
        nb::arg("last_year"), nb::arg("num_languages"), nb::arg("words"), nb::arg("lower"),
        nb::arg("scripts"), nb::arg("named"), nb::arg("ukrainian_letters"));

  nb::class_<Folder>(m, "Folder")
      .def(nb::init<>())
      .def("add", [](Folder& folder, uint32_t code,
                     const std::string& folded) { folder.add(code, folded); })
      .def("fold", &fold, nb::arg("data").noconvert(), nb::arg("offsets").noconvert());
  nb::class_<MinHasher>(m, "MinHasher")
      .def("sign", &sign, nb::arg("data").noconvert(), nb::arg("offsets").noconvert());
  m.def("make_min_hasher", &make_min_hasher, nb::arg("width"), nb::arg("a"), nb::arg("b"),
        nb::arg("values").noconvert());
}
