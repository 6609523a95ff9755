// What the scoring loops of indexer.cc share between their SIMD targets: the unit of work and its
// scratch.
#pragma once

#include <cstdint>

namespace lacuna::cpu {

// Keys gathered at once: a multiple of every target's register tile (12 or 6) and of 4; with a key
// of 128 floats they take 72 KiB, which L2 holds next to the queries.
inline constexpr int64_t kScoreKeys = 144;
// Elements of a key that lie together in scratch. A constant, so that the addresses of a tile's
// keys are one register and constant offsets; wider keys take several planes.
inline constexpr int64_t kScoreDims = 128;

// Heads in scratch: whole vectors of every target.
constexpr int64_t padded_heads(int64_t heads) { return (heads + 15) / 16 * 16; }

// Rows times keys of one task.
struct ScoreBlock {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t key_begin = 0;
  int64_t key_end = 0;
  bool fill = false;  // write -inf to columns that a row does not see
};

// Scratch of one worker.
struct ScoreScratch {
  float* queries;  // [rows, padded heads * dim]: see pack_query
  float* weights;  // [rows, padded heads]
  float* keys;     // [planes of a key, kScoreKeys, kScoreDims]
  float* sums;     // [kScoreKeys, lanes]: scores by vector lane
  float* scales;   // [kScoreKeys]
  int32_t* valid;  // [kScoreKeys]: 0 where a position has no key
};

}  // namespace lacuna::cpu
