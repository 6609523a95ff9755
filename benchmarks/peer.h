// What a shared library exports so that `lacuna bench attention --peer` measures it beside our own
// kernels: C only, no header of ours needed. Pointers are those of the device that the call is on
// (plain memory for the CPU). Nothing here may synchronise or allocate in run().
#ifndef LACUNA_BENCHMARKS_PEER_H_
#define LACUNA_BENCHMARKS_PEER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LACUNA_PEER_VERSION = 1 };
enum { LACUNA_PEER_KV_BF16 = 0, LACUNA_PEER_KV_F32 = 1, LACUNA_PEER_KV_FP8_DS_MLA = 2 };
enum { LACUNA_PEER_CPU = 0, LACUNA_PEER_CUDA = 1 };
enum { LACUNA_PEER_LSE_NATURAL = 0, LACUNA_PEER_LSE_BASE_TWO = 1 };

/* Sparse MLA of `rows` query rows over lists of `topk` rows of a flat cache of `context` rows. */
typedef struct {
  int64_t rows;
  int64_t heads;
  int64_t d_qk;
  int64_t d_v;
  int64_t topk;
  int64_t context;
  int64_t row_bytes;
  int32_t kv_format; /* LACUNA_PEER_KV_... */
  int32_t device_kind;
  int32_t device_index;
} LacunaPeerShape;

typedef struct {
  const void* q;          /* [rows, heads, d_qk] bf16 */
  const void* kv;         /* [context] records of row_bytes */
  const int32_t* indices; /* [rows, topk]; -1: none */
  float softmax_scale;
  void* out;  /* [rows, heads, d_v] bf16 */
  float* lse; /* [rows, heads], in the peer's base */
  void* workspace;
  void* stream; /* cudaStream_t; null on the CPU */
} LacunaPeerCall;

typedef struct {
  int32_t version; /* LACUNA_PEER_VERSION */
  const char* name;
  int32_t lse_base;    /* LACUNA_PEER_LSE_... */
  float empty_row_lse; /* what it writes for a row without keys; NaN: anything */
  /* Null when the shape is fine, else why not. */
  const char* (*supports)(const LacunaPeerShape* shape);
  int64_t (*workspace_bytes)(const LacunaPeerShape* shape);             /* null: none */
  int (*run)(const LacunaPeerShape* shape, const LacunaPeerCall* call); /* 0: enqueued */
} LacunaPeer;

/* The one symbol of the library. */
const LacunaPeer* lacuna_peer(void);

#ifdef __cplusplus
}
#endif
#endif
