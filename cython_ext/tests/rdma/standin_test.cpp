// SPDX-License-Identifier: Apache-2.0
//
// The stand-in itself: it refuses what a device refuses, and when it says that something is over, it is.
#include <cstring>

#include "support.hpp"
#include "verbs.hpp"
// After verbs.hpp, which takes macros of the library away.
#include "standin.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

constexpr uint64_t kBytes = 1u << 20;
constexpr uint64_t kStart = 4096;
constexpr unsigned kAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

// One end of a connection.
struct End {
  const Verbs *verbs = nullptr;
  ibv_context *context = nullptr;
  ibv_pd *pd = nullptr;
  ibv_cq *cq = nullptr;
  ibv_qp *qp = nullptr;
  ibv_mr *mr = nullptr;
  Bytes memory;

  void open(const Verbs *with, ibv_device *device, uint8_t fill) {
    verbs = with;
    // A page more, for a beginning at the start of one.
    memory = Bytes(kBytes + 4096, fill);
    context = verbs->open_device(device);
    pd = verbs->alloc_pd(context);
    cq = verbs->create_cq(context, 64, nullptr, nullptr, 0);
    ibv_qp_init_attr wanted{};
    wanted.qp_type = IBV_QPT_RC;
    wanted.send_cq = wanted.recv_cq = cq;
    wanted.cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = 64};
    qp = verbs->create_qp(pd, &wanted);
    add(kAll);
    ibv_qp_attr init{};
    init.qp_state = IBV_QPS_INIT;
    init.port_num = 1;
    init.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    EXPECT_EQ(verbs->modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
  }
  uint8_t *base() { return memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096) % 4096; }
  void add(unsigned access) {
    mr = verbs->reg_mr_iova2(pd, base(), kBytes, kStart, access);
    ASSERT_NE(mr, nullptr);
  }
  void drop() { EXPECT_EQ(verbs->dereg_mr(std::exchange(mr, nullptr)), 0); }
  void connect(const End &other, const std::array<uint8_t, 16> &gid, uint32_t psn) {
    ibv_qp_attr rtr{};
    rtr.qp_state = IBV_QPS_RTR;
    rtr.path_mtu = IBV_MTU_1024;
    rtr.dest_qp_num = other.qp->qp_num;
    rtr.rq_psn = psn;
    rtr.max_dest_rd_atomic = 4;
    rtr.ah_attr.is_global = 1;
    rtr.ah_attr.grh.sgid_index = 0;
    std::copy(gid.begin(), gid.end(), rtr.ah_attr.grh.dgid.raw);
    EXPECT_EQ(verbs->modify_qp(qp, &rtr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
              0);
    ibv_qp_attr rts{};
    rts.qp_state = IBV_QPS_RTS;
    rts.timeout = 14;
    rts.sq_psn = psn;
    rts.max_rd_atomic = 4;
    EXPECT_EQ(verbs->modify_qp(qp, &rts,
                               IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                   IBV_QP_MAX_QP_RD_ATOMIC),
              0);
  }
  void end() {
    if (qp == nullptr) return;
    EXPECT_EQ(verbs->destroy_qp(std::exchange(qp, nullptr)), 0);
  }
  void close() {
    end();
    if (mr != nullptr) drop();
    EXPECT_EQ(verbs->destroy_cq(cq), 0);
    EXPECT_EQ(verbs->dealloc_pd(pd), 0);
    EXPECT_EQ(verbs->close_device(context), 0);
  }
};

class StandIn : public ::testing::Test {
 protected:
  void SetUp() override {
    standin::reset();
    std::string why_not;
    const Verbs *verbs = Verbs::load(&why_not);
    ASSERT_NE(verbs, nullptr) << why_not;
    // The library that is loaded already, not the host's.
    int n = 0;
    ibv_device **list = verbs->get_device_list(&n);
    ASSERT_EQ(n, standin::kDevices);
    ASSERT_EQ(verbs->get_device_name(list[0]), standin::device_name(0));
    standin::set_gids(0, {{0, IBV_GID_TYPE_ROCE_V2, here_}});
    standin::set_gids(1, {{0, IBV_GID_TYPE_ROCE_V2, there_}});
    requester_.open(verbs, list[0], 1);
    responder_.open(verbs, list[1], 2);
    verbs->free_device_list(list);
    requester_.connect(responder_, there_, 100);
    responder_.connect(requester_, here_, 100);
  }
  void TearDown() override {
    standin::hold_requests(false);
    requester_.close();
    responder_.close();
    EXPECT_EQ(standin::alive(), standin::Alive{}) << standin::text_of(standin::alive());
  }
  int post(ibv_wr_opcode opcode, uint64_t remote_at, uint32_t bytes, uint32_t rkey, unsigned flags = 0) {
    ibv_sge piece{kStart, bytes, requester_.mr->lkey};
    if ((flags & IBV_SEND_INLINE) != 0) piece.addr = reinterpret_cast<uintptr_t>(requester_.base());
    ibv_send_wr wr{};
    wr.sg_list = &piece;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED | flags;
    wr.wr.rdma.remote_addr = remote_at;
    wr.wr.rdma.rkey = rkey;
    ibv_send_wr *bad = nullptr;
    return ibv_post_send(requester_.qp, &wr, &bad);
  }
  static ibv_wc_status next(End &end) {
    ibv_wc wc{};
    EXPECT_TRUE(eventually([&] { return ibv_poll_cq(end.cq, 1, &wc) == 1; }));
    return wc.status;
  }
  ibv_wc_status write(uint64_t remote_at, uint32_t bytes, uint32_t rkey) {
    EXPECT_EQ(post(IBV_WR_RDMA_WRITE, remote_at, bytes, rkey), 0);
    return next(requester_);
  }
  uint32_t rkey() const { return responder_.mr->rkey; }

  const std::array<uint8_t, 16> here_{0xfe, 0x80, 1}, there_{0xfe, 0x80, 2};
  End requester_, responder_;
};

TEST_F(StandIn, MovesWhatItIsAskedTo) {
  EXPECT_EQ(write(kStart + 10, 100, rkey()), IBV_WC_SUCCESS);
  EXPECT_EQ(std::count(responder_.memory.begin(), responder_.memory.end(), 1), 100);
  EXPECT_EQ(responder_.base()[10], 1);
  EXPECT_EQ(post(IBV_WR_RDMA_READ, kStart + 5, 10, rkey()), 0);
  EXPECT_EQ(next(requester_), IBV_WC_SUCCESS);
  EXPECT_EQ(requester_.base()[4], 2);
  EXPECT_EQ(requester_.base()[5], 1);
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, kStart, 64, rkey(), IBV_SEND_INLINE), 0);
  EXPECT_EQ(next(requester_), IBV_WC_SUCCESS);
  EXPECT_EQ(standin::misuses(), std::vector<std::string>{});
}

TEST_F(StandIn, RefusesBytesOutsideTheRegistration) {
  EXPECT_EQ(write(kStart + kBytes - 99, 100, rkey()), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(write(kStart, 1, rkey()), IBV_WC_WR_FLUSH_ERR) << "the queue pair is of no use any more";
  EXPECT_EQ(responder_.memory, Bytes(kBytes + 4096, 2));
}

TEST_F(StandIn, RefusesAnAddressBeforeTheRegistration) {
  EXPECT_EQ(write(kStart - 1, 1, rkey()), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(StandIn, RefusesAKeyThatIsDead) {
  const uint32_t dead = rkey();
  responder_.drop();
  responder_.add(kAll);
  EXPECT_EQ(write(kStart, 1, dead), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(StandIn, RefusesWhatTheRegistrationDoesNotAllow) {
  responder_.drop();
  responder_.add(IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(write(kStart, 1, rkey()), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(StandIn, RefusesALocalKeyOfAnother) {
  requester_.drop();
  requester_.add(IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(post(IBV_WR_RDMA_READ, kStart, 1, rkey()), 0);
  EXPECT_EQ(next(requester_), IBV_WC_LOC_PROT_ERR) << "a read writes here";
}

TEST_F(StandIn, ImmediateDataWaitsForAReceive) {
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE_WITH_IMM, kStart, 8, rkey()), 0);
  ibv_wc wc{};
  EXPECT_EQ(ibv_poll_cq(requester_.cq, 1, &wc), 0);
  EXPECT_EQ(standin::requests_waiting(), 1u);
  ibv_recv_wr receive{}, *bad = nullptr;
  EXPECT_EQ(ibv_post_recv(responder_.qp, &receive, &bad), 0);
  EXPECT_EQ(next(requester_), IBV_WC_SUCCESS);
  EXPECT_EQ(next(responder_), IBV_WC_SUCCESS);
}

TEST_F(StandIn, NothingLandsOnceTheQueuePairOrTheOtherHasGone) {
  for (End *end : {&responder_, &requester_}) {
    standin::hold_requests(true);
    EXPECT_EQ(post(IBV_WR_RDMA_WRITE, kStart, 100, rkey()), 0);
    end->end();
    standin::hold_requests(false);
    EXPECT_EQ(responder_.memory, Bytes(kBytes + 4096, 2));
  }
}

TEST_F(StandIn, AThreadThatIsCopyingIsWaitedFor) {
  standin::set_deferred(true);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(post(IBV_WR_RDMA_WRITE, kStart, kBytes, rkey()), 0);
  // Now the memory is the test's again, which the sanitizers know too.
  responder_.end();
  std::fill(responder_.memory.begin(), responder_.memory.end(), 7);
  requester_.end();
  EXPECT_EQ(responder_.memory, Bytes(kBytes + 4096, 7));
}

TEST_F(StandIn, NoticesASendQueueThatOverflows) {
  standin::hold_requests(true);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(post(IBV_WR_RDMA_WRITE, kStart, 1, rkey()), 0);
  EXPECT_EQ(post(IBV_WR_RDMA_WRITE, kStart, 1, rkey()), ENOMEM);
  EXPECT_EQ(standin::misuses().size(), 1u);
}

TEST_F(StandIn, NoticesWhatGoesBeforeItsParts) {
  EXPECT_EQ(responder_.verbs->destroy_cq(responder_.cq), EBUSY);
  EXPECT_EQ(responder_.verbs->dealloc_pd(responder_.pd), EBUSY);
  EXPECT_EQ(standin::misuses().size(), 2u);
}

}  // namespace
}  // namespace moonpool
