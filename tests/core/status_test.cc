// Status, Result and the macros that pass them on.
#include "lacuna/status.h"

#include <gtest/gtest.h>

#include <memory>

#include "core/check.h"

namespace lacuna {
namespace {

TEST(Status, IsOkByDefault) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_TRUE(ok_status().ok());
}

TEST(Status, KeepsCodeAndMessage) {
  struct Row {
    Status status;
    StatusCode code;
    std::string_view name;
  };
  const Row rows[] = {
      {invalid_argument("m"), StatusCode::kInvalidArgument, "invalid argument"},
      {unsupported("m"), StatusCode::kUnsupported, "unsupported"},
      {not_found("m"), StatusCode::kNotFound, "not found"},
      {out_of_memory("m"), StatusCode::kOutOfMemory, "out of memory"},
      {io_error("m"), StatusCode::kIo, "i/o error"},
      {data_loss("m"), StatusCode::kDataLoss, "data loss"},
      {{StatusCode::kCancelled, "m"}, StatusCode::kCancelled, "cancelled"},
      {internal_error("m"), StatusCode::kInternal, "internal error"},
  };
  for (const Row& row : rows) {
    EXPECT_FALSE(row.status.ok()) << row.name;
    EXPECT_EQ(row.status.code(), row.code) << row.name;
    EXPECT_EQ(row.status.message(), "m") << row.name;
    EXPECT_EQ(status_code_name(row.code), row.name);
  }
  EXPECT_EQ(status_code_name(StatusCode::kOk), "ok");
}

TEST(Result, HoldsAValueThatMayOnlyMove) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result.status().ok());
  EXPECT_EQ(**result, 7);
  const std::unique_ptr<int> taken = std::move(result).value();
  EXPECT_EQ(*taken, 7);
}

TEST(Result, HoldsTheReasonWhenThereIsNoValue) {
  const Result<int> result(not_found("no such file"));
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kNotFound);
  EXPECT_EQ(result.status().message(), "no such file");
}

Result<int> half(int x) {
  if (x % 2 != 0) {
    return invalid_argument("x: odd");
  }
  return x / 2;
}

Result<int> quarter(int x, int* reached) {
  LACUNA_ASSIGN_OR_RETURN(const int first, half(x));
  ++*reached;
  LACUNA_ASSIGN_OR_RETURN(const int second, half(first));
  ++*reached;
  return second;
}

Status check_even(int x, int* reached) {
  LACUNA_RETURN_IF_ERROR(half(x).status());
  ++*reached;
  return ok_status();
}

TEST(StatusMacros, ReturnTheFirstError) {
  int reached = 0;
  EXPECT_EQ(*quarter(12, &reached), 3);
  EXPECT_EQ(reached, 2);
  reached = 0;
  EXPECT_FALSE(quarter(6, &reached).ok());
  EXPECT_EQ(reached, 1);
  reached = 0;
  EXPECT_EQ(check_even(3, &reached).message(), "x: odd");
  EXPECT_EQ(reached, 0);
  EXPECT_TRUE(check_even(4, &reached).ok());
  EXPECT_EQ(reached, 1);
}

TEST(CheckDeathTest, NamesTheBrokenInvariantAndTheFile) {
  const int one = 1;
  LACUNA_CHECK(one == 1);
  EXPECT_DEATH(LACUNA_CHECK(one == 2), "one == 2 does not hold at .*status_test\\.cc");
}

}  // namespace
}  // namespace lacuna
