#include "words.h"

#include <cstring>
#include <new>
#include <utility>

namespace headrace::text {
namespace {

const uint8_t* contraction(const uint8_t* p, const uint8_t* limit, bool any_case) {
  if (*p != '\'' || limit - p < 2) {
    return p;
  }
  const auto lower = [any_case](uint8_t c) {
    return static_cast<uint8_t>(any_case && c >= 'A' && c <= 'Z' ? c | 0x20 : c);
  };
  const uint8_t first = lower(p[1]);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') {
    return p + 2;
  }
  if (limit - p < 3) {
    return p;
  }
  const uint8_t second = lower(p[2]);
  const bool is_long = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
                       (first == 'l' && second == 'l');
  return is_long ? p + 3 : p;
}

uint8_t* zeros(size_t count) {
  void* memory = std::calloc(count, 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return static_cast<uint8_t*>(memory);
}

}  // namespace

Classes::Classes() : classes_(zeros(kNumCodePoints)), orders_(zeros(kNumCodePoints)) {}

bool is_ascii(const uint8_t* begin, const uint8_t* end) {
  uint64_t seen = 0;
  for (; end - begin >= 8; begin += 8) {
    uint64_t piece;
    std::memcpy(&piece, begin, 8);
    seen |= piece;
  }
  for (; begin < end; ++begin) {
    seen |= *begin;
  }
  return (seen & 0x8080808080808080u) == 0;
}

Cutter::Cutter(std::vector<Rule> rules, bool digits_alone)
    : rules_(std::move(rules)), digits_alone_(digits_alone) {}

bool Cutter::accepts(const uint8_t* begin, const uint8_t* end, bool normalised) const {
  if (is_ascii(begin, end)) {
    return true;  // Python has asked about all of ASCII
  }
  uint8_t last = 0;
  for (const uint8_t* p = begin; p < end;) {
    if (*p < 0x80) {
      ++p;
      last = 0;
      continue;
    }
    const uint32_t code = next_code(p);
    const uint8_t char_class = classes_.at(code);
    if ((char_class & kKnown) == 0 || (char_class & kRefused) != 0) {
      return false;
    }
    if (normalised) {
      const uint8_t order = classes_.order(code);
      if (order == kNoOrder || (order != 0 && last > order)) {
        return false;
      }
      last = order;
    }
  }
  return true;
}

const uint8_t* Cutter::run(const Rule& rule, const uint8_t* p, const uint8_t* limit) const {
  const uint8_t* next;
  int32_t taken = 0;
  while (p < limit && (rule.most == 0 || taken < rule.most)) {
    if (!rule.body.has(class_at(p, next))) {
      break;
    }
    p = next;
    ++taken;
  }
  if (taken != 0 && rule.takes_newlines) {
    while (p < limit && (*p == '\r' || *p == '\n')) {
      ++p;
    }
  }
  return p;
}

const uint8_t* Cutter::match(const Rule& rule, const uint8_t* p, const uint8_t* limit) const {
  const uint8_t* next;
  switch (rule.kind) {
    case Kind::kContraction:
      return contraction(p, limit, false);
    case Kind::kAnyCaseContraction:
      return contraction(p, limit, true);
    case Kind::kRun: {
      const uint8_t here = class_at(p, next);
      if (rule.has_lead && rule.lead.has(here) && next < limit) {
        const uint8_t* unused;
        if (rule.body.has(class_at(next, unused))) {
          return run(rule, next, limit);
        }
      }
      return rule.body.has(here) ? run(rule, p, limit) : p;
    }
    case Kind::kToNewline: {
      const uint8_t* found = p;
      for (const uint8_t* q = p; q < limit; q = next) {
        const uint8_t here = class_at(q, next);
        if ((here & kSpace) == 0) {
          break;
        }
        if ((here & kNewline) != 0) {
          found = next;
        }
      }
      return found;
    }
    case Kind::kSpacesBefore: {
      const uint8_t* q = p;
      const uint8_t* last = p;
      while (q < limit && (class_at(q, next) & kSpace) != 0) {
        last = q;
        q = next;
      }
      return q == limit ? q : last;
    }
  }
  return p;
}

const uint8_t* Cutter::word_end(const uint8_t* p, const uint8_t* limit) const {
  for (const Rule& rule : rules_) {
    const uint8_t* end = match(rule, p, limit);
    if (end != p) {
      return end;
    }
  }
  return limit;  // the rules cover every character: Python has made sure
}

const uint8_t* Cutter::limit_from(const uint8_t* p, const uint8_t* end) const {
  if (!digits_alone_) {
    return end;
  }
  const uint8_t* next;
  if ((class_at(p, next) & kNumber) != 0) {
    return next;
  }
  while (p < end && (class_at(p, next) & kNumber) == 0) {
    p = next;
  }
  return p;
}

}  // namespace headrace::text
