// Who computes what in sparse MLA on the CPU: each row of queries is one task, or is cut into
// splits of its list that are tasks of their own. Plain arithmetic over the rows' lengths; the
// kernel is attention.cc.
#pragma once

#include <cstdint>

#include "lacuna/tensor.h"

namespace lacuna::cpu {

// An entry of a schedule. Entries [0, T) are the rows; entry T closes the list (see ScheduleEnd).
struct RowSplit {
  int32_t first_task;      // tasks of earlier rows
  int32_t num_splits;      // >= 1
  int32_t keys_per_split;  // entries of the list a split; the last one takes what remains
  int32_t first_slot;      // slot of the first split's partial state; -1: the row is one task

  int num_tasks() const { return first_slot < 0 ? 1 : num_splits; }
};

struct ScheduleEnd {
  int32_t num_tasks;
  int32_t num_slots;
  int32_t list_width;
  int32_t kind;  // kBalanced or kInvariant
};
static_assert(sizeof(RowSplit) == 4 * sizeof(int32_t) && sizeof(ScheduleEnd) == sizeof(RowSplit));

// Values that memory which is no schedule hardly holds.
inline constexpr int32_t kBalanced = 0x4c41'4301;
inline constexpr int32_t kInvariant = 0x4c41'4302;

// What the plan depends on.
struct PlanShape {
  int64_t num_rows;    // T
  int64_t list_width;  // W
  int num_threads;
  bool batch_invariant;
};

// Leading entries of row t that count: min(max(valid_counts[t], 0), W).
int64_t list_length(const ConstTensorView& valid_counts, int64_t list_width, int64_t t);

// Partial states that any plan of this shape may need: monotone in rows, width and threads, and
// independent of the rows' lengths.
int64_t plan_slots_max(const PlanShape& shape);

// Splits that a row which is one task may have (they share the worker's own slots).
int64_t whole_row_splits_max(const PlanShape& shape);

// Fills entries [0, T] of `splits`.
void plan_rows(const PlanShape& shape, const ConstTensorView& valid_counts, RowSplit* splits);

// A schedule comes through the caller's hands: true only if it is one that plan_rows could have
// made for this shape (any lengths), so that following it stays within the workspace.
bool is_plan(const PlanShape& shape, const RowSplit* splits, int64_t num_entries);

}  // namespace lacuna::cpu
