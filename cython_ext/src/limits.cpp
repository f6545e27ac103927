// SPDX-License-Identifier: Apache-2.0
#include "limits_api.h"
#include "limits_link.hpp"
#include "limits_process.hpp"
#include "limits_streams.hpp"

using namespace moonpool::limits;

namespace {

mpl_status check_list(const mpl_list *list, mpl_error *error) {
  if (list == nullptr || list->memory == nullptr || list->offsets == nullptr || list->lengths == nullptr)
    return fail(error, MPL_INVALID, 0, "the descriptor list or one of its arrays is NULL");
  if (list->batch == 0 || list->streams == 0 || list->streams > MPL_STREAMS_MAX || list->count == 0 ||
      list->count % (list->streams * list->batch) != 0)
    return fail(error, MPL_INVALID, 0, "%zu descriptors do not divide into batches of %zu for %zu streams", list->count,
                list->batch, list->streams);
  for (size_t i = 0; i < list->count; ++i) {
    const int64_t offset = list->offsets[i], length = list->lengths[i];
    if (offset < 0 || length <= 0 || static_cast<uint64_t>(offset) > list->memory_bytes ||
        static_cast<uint64_t>(length) > list->memory_bytes - static_cast<uint64_t>(offset))
      return fail(error, MPL_INVALID, 0, "descriptor %zu, offset %lld and length %lld, lies outside the memory", i,
                  static_cast<long long>(offset), static_cast<long long>(length));
  }
  return MPL_OK;
}

mpl_status check_work(const mpl_link *link, const mpl_list *list, mpl_op op, mpl_mode mode, const uint64_t *next_batch,
                      mpl_error *error) {
  if (link == nullptr || next_batch == nullptr || (op != MPL_READ && op != MPL_WRITE) ||
      (mode != MPL_ACKED && mode != MPL_STREAM))
    return fail(error, MPL_INVALID, 0, "a NULL link or next_batch, or an unknown op or mode");
  if (const mpl_status status = check_list(list, error); status != MPL_OK) return status;
  if (link->sockets.size() < list->streams)
    return fail(error, MPL_INVALID, 0, "%zu connections cannot serve %zu streams", link->sockets.size(), list->streams);
  if (link->aborted) return fail(error, MPL_ABORTED, 0, "aborted");
  return MPL_OK;
}

std::vector<Lane> lanes_of(const mpl_link &link, const mpl_list &list, size_t stream, Failure &failure) {
  const size_t each = link.sockets.size() / list.streams;
  std::vector<Lane> lanes;
  for (size_t i = 0; i < connections_used(list, each); ++i)
    lanes.emplace_back(link.sockets[stream * each + i], failure);
  return lanes;
}

uint64_t bytes_done(const Walk &walk, uint64_t first, uint64_t batches) {
  uint64_t cycle = 0, total = 0;
  if (batches >= walk.batches) {
    for (size_t i = 0; i < walk.batches; ++i) cycle += walk.batch_bytes(i);
    total = batches / walk.batches * cycle;
  }
  for (uint64_t i = 0; i < batches % walk.batches; ++i) total += walk.batch_bytes(first + i);
  return total;
}

// Adds up the streams. `outcomes` yields the outcome of stream 0, 1, ...
template <typename Outcomes>
void collect(const mpl_list &list, Outcomes outcomes, uint64_t *next_batch, mpl_result *result) {
  int64_t begin_ns = INT64_MAX, end_ns = 0;
  result->batches = result->bytes = result->samples_count = 0;
  for (size_t stream = 0; stream < list.streams; ++stream) {
    const Outcome &outcome = outcomes(stream);
    begin_ns = std::min(begin_ns, outcome.begin_ns);
    end_ns = std::max(end_ns, outcome.end_ns);
    result->batches += outcome.batches;
    result->bytes += bytes_done(Walk(list, stream), next_batch[stream], outcome.batches);
    next_batch[stream] += outcome.batches;
    for (const int64_t ns : outcome.samples.kept()) result->samples_ns[result->samples_count++] = ns;
  }
  result->window_ns = end_ns - begin_ns;
}

// Two lists of one process, or of two, between which blocks are copied by `threads`.
mpl_status check_pair(const mpl_list *first, const mpl_list *second, size_t threads, const uint64_t *next_batch,
                      mpl_error *error) {
  if (const mpl_status status = check_list(first, error); status != MPL_OK) return status;
  if (const mpl_status status = check_list(second, error); status != MPL_OK) return status;
  if (next_batch == nullptr || first->count != second->count || first->batch != second->batch ||
      first->streams != second->streams || !std::equal(first->lengths, first->lengths + first->count, second->lengths))
    return fail(error, MPL_INVALID, 0, "source and destination are not cut alike");
  if (threads < first->streams || threads > MPL_CONNECTIONS_MAX)
    return fail(error, MPL_INVALID, 0, "%zu threads cannot serve %zu streams", threads, first->streams);
  return MPL_OK;
}

size_t samples_each(const mpl_result &result, const mpl_list &list) {
  return result.samples_ns == nullptr ? 0 : result.samples_capacity / list.streams;
}

}  // namespace

mpl_status mpl_client_run(mpl_link *link, const mpl_list *list, mpl_op op, mpl_mode mode, int64_t duration_ns,
                          const int32_t *stop, uint64_t *next_batch, mpl_result *result, mpl_error *error) {
  if (const mpl_status status = check_work(link, list, op, mode, next_batch, error); status != MPL_OK) return status;
  return guarded(error, [&] {
    const Work work{op, mode, duration_ns, stop};
    Failure failure(link->sockets, link->aborted);
    std::deque<ClientStream> streams;
    Crew crew;
    for (size_t i = 0; i < list->streams; ++i) {
      streams.emplace_back(work, Walk(*list, i), next_batch[i], lanes_of(*link, *list, i, failure), failure,
                           samples_each(*result, *list));
      streams.back().staff(crew);
    }
    crew.run();
    if (failure.failed()) return failure.result(error);
    collect(*list, [&](size_t i) -> const Outcome & { return streams[i].outcome(); }, next_batch, result);
    return MPL_OK;
  });
}

mpl_status mpl_server_run(mpl_link *link, const mpl_list *list, mpl_op op, mpl_mode mode, uint32_t runs,
                          uint64_t *next_batch, mpl_error *error) {
  if (const mpl_status status = check_work(link, list, op, mode, next_batch, error); status != MPL_OK) return status;
  return guarded(error, [&] {
    const Work work{op, mode, 0, nullptr};
    Failure failure(link->sockets, link->aborted);
    std::deque<ServerStream> streams;
    Crew crew;
    for (size_t i = 0; i < list->streams; ++i) {
      streams.emplace_back(work, Walk(*list, i), next_batch[i], runs, lanes_of(*link, *list, i, failure), failure);
      streams.back().staff(crew);
    }
    crew.run();
    for (size_t i = 0; i < list->streams; ++i) next_batch[i] = streams[i].next_batch();
    return failure.result(error);
  });
}

mpl_status mpl_copy_run(const mpl_list *destination, const mpl_list *source, size_t threads, int64_t duration_ns,
                        const int32_t *stop, uint64_t *next_batch, mpl_result *result, mpl_error *error) {
  if (const mpl_status status = check_pair(source, destination, threads, next_batch, error); status != MPL_OK)
    return status;
  return guarded(error, [&] {
    const Work work{MPL_WRITE, MPL_ACKED, duration_ns, stop};
    const size_t width = connections_used(*source, threads / source->streams);
    std::deque<CopyStream> streams;
    Crew crew;
    for (size_t i = 0; i < source->streams; ++i) {
      streams.emplace_back(work, *destination, Walk(*source, i), next_batch[i], width, samples_each(*result, *source));
      streams.back().staff(crew);
    }
    crew.run();
    collect(*source, [&](size_t i) -> const Outcome & { return streams[i].outcome(); }, next_batch, result);
    return MPL_OK;
  });
}

mpl_status mpl_process_run(int32_t pid, const mpl_list *own, const mpl_list *other, mpl_op op, size_t threads,
                           int64_t duration_ns, const int32_t *stop, uint64_t *next_batch, mpl_result *result,
                           mpl_error *error) {
  if (op != MPL_READ && op != MPL_WRITE) return fail(error, MPL_INVALID, 0, "an unknown op");
  if (const mpl_status status = check_pair(own, other, threads, next_batch, error); status != MPL_OK) return status;
  return guarded(error, [&] {
    const Work work{op, MPL_ACKED, duration_ns, stop};
    const std::vector<Socket> no_sockets;
    const std::atomic<bool> never_aborted{false};
    Failure failure(no_sockets, never_aborted);
    const size_t width = connections_used(*own, threads / own->streams);
    std::deque<ProcessStream> streams;
    Crew crew;
    for (size_t i = 0; i < own->streams; ++i) {
      streams.emplace_back(work, pid, *other, Walk(*own, i), next_batch[i], width, failure,
                           samples_each(*result, *own));
      streams.back().staff(crew);
    }
    crew.run();
    if (failure.failed()) return failure.result(error);
    collect(*own, [&](size_t i) -> const Outcome & { return streams[i].outcome(); }, next_batch, result);
    return MPL_OK;
  });
}
