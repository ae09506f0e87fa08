#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <queue>

namespace headrace::text {
namespace {

constexpr size_t kLongestRemembered = 64;  // bytes
constexpr size_t kMostRemembered = size_t{1} << 20;
constexpr size_t kShort = 48;  // symbols up to which looking at all pairs is the fastest
constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

uint64_t mixed(uint64_t value) {
  value ^= value >> 32;
  value *= 0x9E3779B97F4A7C15u;
  return value ^ (value >> 29);
}

uint64_t hash_of(std::string_view word) {
  uint64_t hash = word.size() * 0xD6E8FEB86659FD93u;
  const char* p = word.data();
  size_t left = word.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t piece;
    std::memcpy(&piece, p, 8);
    hash = mixed(hash ^ piece);
  }
  uint64_t piece = 0;
  std::memcpy(&piece, p, left);
  return mixed(mixed(hash ^ piece));
}

}  // namespace

void PairTable::fill(const int32_t* left, const int32_t* right, const int32_t* merged,
                     int64_t num) {
  size_t size = 16;
  while (size < 2 * static_cast<size_t>(num) + 1) {
    size *= 2;
  }
  keys_.assign(size, kNone);
  merges_.assign(size, Merge{0, 0});
  mask_ = size - 1;
  for (int64_t rank = 0; rank < num; ++rank) {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(left[rank])) << 32 |
                         static_cast<uint32_t>(right[rank]);
    uint64_t at = mixed(key) & mask_;
    while (keys_[at] != kNone && keys_[at] != key) {
      at = (at + 1) & mask_;
    }
    keys_[at] = key;
    merges_[at] = Merge{static_cast<int32_t>(rank), merged[rank]};
  }
}

const PairTable::Merge* PairTable::find(int32_t left, int32_t right) const {
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 |
                       static_cast<uint32_t>(right);
  for (uint64_t at = mixed(key) & mask_;; at = (at + 1) & mask_) {
    if (keys_[at] == key) {
      return &merges_[at];
    }
    if (keys_[at] == kNone) {
      return nullptr;
    }
  }
}

WordTable::WordTable() { clear(); }

void WordTable::clear() {
  entries_.assign(size_t{1} << 12, Entry{});
  mask_ = entries_.size() - 1;
  words_.clear();
  ids_.clear();
  num_ = 0;
}

void WordTable::grow() {
  std::vector<Entry> larger(entries_.size() * 2);
  mask_ = larger.size() - 1;
  for (const Entry& entry : entries_) {
    if (entry.length != 0) {
      uint64_t at = entry.hash & mask_;
      while (larger[at].length != 0) {
        at = (at + 1) & mask_;
      }
      larger[at] = entry;
    }
  }
  entries_ = std::move(larger);
}

const int32_t* WordTable::find(std::string_view word, uint64_t hash, int32_t* num) const {
  for (uint64_t at = hash & mask_;; at = (at + 1) & mask_) {
    const Entry& entry = entries_[at];
    if (entry.length == 0) {
      return nullptr;
    }
    if (entry.hash == hash && entry.length == word.size() &&
        std::memcmp(words_.data() + entry.word, word.data(), word.size()) == 0) {
      *num = entry.num;
      return ids_.data() + entry.ids;
    }
  }
}

void WordTable::add(std::string_view word, uint64_t hash, const int32_t* ids, int32_t num) {
  if (num_ >= kMostRemembered) {
    clear();
  }
  if (2 * (num_ + 1) > entries_.size()) {
    grow();
  }
  uint64_t at = hash & mask_;
  while (entries_[at].length != 0) {
    at = (at + 1) & mask_;
  }
  entries_[at] = Entry{hash, static_cast<uint32_t>(words_.size()),
                       static_cast<uint32_t>(ids_.size()), static_cast<uint16_t>(word.size()),
                       static_cast<uint16_t>(num)};
  words_.insert(words_.end(), word.begin(), word.end());
  ids_.insert(ids_.end(), ids, ids + num);
  ++num_;
}

Encoder::Encoder(Cutter cutter, std::array<int32_t, 256> byte_ids, bool normalised)
    : cutter_(std::move(cutter)), byte_ids_(byte_ids), normalised_(normalised) {
  merges_.fill(nullptr, nullptr, nullptr, 0);
}

bool Encoder::holds_added(const uint8_t* begin, const uint8_t* end) const {
  for (size_t first = 0; first < added_.size();) {
    // They are sorted: those with the same first byte are looked for together.
    size_t last = first;
    while (last < added_.size() && added_[last][0] == added_[first][0]) {
      ++last;
    }
    const uint8_t* p = begin;
    while (p < end) {
      p = static_cast<const uint8_t*>(
          std::memchr(p, static_cast<uint8_t>(added_[first][0]), static_cast<size_t>(end - p)));
      if (p == nullptr) {
        break;
      }
      for (size_t i = first; i < last; ++i) {
        const std::string& token = added_[i];
        if (static_cast<size_t>(end - p) >= token.size() &&
            std::memcmp(p, token.data(), token.size()) == 0) {
          return true;
        }
      }
      ++p;
    }
    first = last;
  }
  return false;
}

bool Encoder::encode(const uint8_t* begin, const uint8_t* end, std::vector<int32_t>& out) {
  if (!cutter_.accepts(begin, end, normalised_) || holds_added(begin, end)) {
    return false;
  }
  const size_t first = out.size();
  out.insert(out.end(), before_.begin(), before_.end());
  for (const uint8_t* p = begin; p < end;) {
    const uint8_t* limit = cutter_.limit_from(p, end);
    while (p < limit) {
      const uint8_t* stop = cutter_.word_end(p, limit);
      const std::string_view word(reinterpret_cast<const char*>(p),
                                  static_cast<size_t>(stop - p));
      p = stop;
      if (word.size() > kLongestRemembered) {
        merge(word);
        out.insert(out.end(), symbols_.begin(), symbols_.end());
        continue;
      }
      const uint64_t hash = hash_of(word);
      int32_t num = 0;
      if (const int32_t* ids = words_.find(word, hash, &num)) {
        out.insert(out.end(), ids, ids + num);
        continue;
      }
      merge(word);
      words_.add(word, hash, symbols_.data(), static_cast<int32_t>(symbols_.size()));
      out.insert(out.end(), symbols_.begin(), symbols_.end());
    }
  }
  if (out.size() == first || out.back() != end_) {
    out.push_back(end_);
  }
  return true;
}

void Encoder::merge(std::string_view word) {
  symbols_.clear();
  if (!whole_.empty()) {
    const auto found = whole_.find(std::string(word));
    if (found != whole_.end()) {
      symbols_.push_back(found->second);
      return;
    }
  }
  for (const char byte : word) {
    symbols_.push_back(byte_ids_[static_cast<uint8_t>(byte)]);
  }
  if (symbols_.size() <= kShort) {
    merge_short();
  } else {
    merge_long();
  }
}

// The pair of the lowest rank, of equal ones the first, until none is left.
void Encoder::merge_short() {
  std::array<PairTable::Merge, kShort> pairs;
  size_t count = symbols_.size();
  const auto look = [&](size_t at) {
    const PairTable::Merge* found = merges_.find(symbols_[at], symbols_[at + 1]);
    pairs[at] = found != nullptr ? *found : PairTable::Merge{kNever, 0};
  };
  for (size_t at = 0; at + 1 < count; ++at) {
    look(at);
  }
  while (count > 1) {
    size_t best = 0;
    for (size_t at = 1; at + 1 < count; ++at) {
      if (pairs[at].rank < pairs[best].rank) {
        best = at;
      }
    }
    if (pairs[best].rank == kNever) {
      break;
    }
    symbols_[best] = pairs[best].id;
    for (size_t at = best + 1; at + 1 < count; ++at) {
      symbols_[at] = symbols_[at + 1];
      pairs[at] = pairs[at + 1 < count - 1 ? at + 1 : at];
    }
    --count;
    if (best > 0) {
      look(best - 1);
    }
    if (best + 1 < count) {
      look(best);
    }
  }
  symbols_.resize(count);
}

// The same by a heap, for words as long as a document.
void Encoder::merge_long() {
  struct Waiting {
    int32_t rank, id;
    size_t at;
    bool operator<(const Waiting& other) const {  // the top is the lowest, then the first
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  constexpr size_t kEnd = std::numeric_limits<size_t>::max();
  const size_t count = symbols_.size();
  std::vector<size_t> next(count), previous(count);
  std::vector<bool> gone(count, false);
  std::priority_queue<Waiting> waiting;
  const auto push = [&](size_t at) {
    if (at == kEnd || next[at] == kEnd) {
      return;
    }
    if (const PairTable::Merge* found = merges_.find(symbols_[at], symbols_[next[at]])) {
      waiting.push(Waiting{found->rank, found->id, at});
    }
  };
  for (size_t at = 0; at < count; ++at) {
    next[at] = at + 1 < count ? at + 1 : kEnd;
    previous[at] = at > 0 ? at - 1 : kEnd;
  }
  for (size_t at = 0; at < count; ++at) {
    push(at);
  }
  while (!waiting.empty()) {
    const Waiting top = waiting.top();
    waiting.pop();
    if (gone[top.at] || next[top.at] == kEnd) {
      continue;
    }
    const size_t right = next[top.at];
    const PairTable::Merge* now = merges_.find(symbols_[top.at], symbols_[right]);
    if (now == nullptr || now->rank != top.rank) {
      continue;  // one of the two has grown since
    }
    symbols_[top.at] = now->id;
    gone[right] = true;
    next[top.at] = next[right];
    if (next[right] != kEnd) {
      previous[next[right]] = top.at;
    }
    push(previous[top.at]);
    push(top.at);
  }
  size_t kept = 0;
  for (size_t at = 0; at < count; ++at) {
    if (!gone[at]) {
      symbols_[kept++] = symbols_[at];
    }
  }
  symbols_.resize(kept);
}

}  // namespace headrace::text
