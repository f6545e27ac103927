// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include "handles.hpp"
#include "support_core.hpp"
#include "support_engine.hpp"

namespace moonpool {
namespace {

using namespace moonpool::testing;

// A write of a lost connection that the peer might still be applying.
struct Orphan {
  explicit Orphan(const std::shared_ptr<Peer> &peer) {
    transfer = std::make_shared<Transfer>(peer, MP_WRITE, false, kNever);
    transfer->count = 1;
    transfer->descs.push_back({nullptr, 1, 0, 10, 0, 1});
    transfer->arm();
    peer->engine().running.add(transfer);
    peer->orphan({{transfer, 0, 1, 10, 0}}, make_error(MP_PEER_LOST, "its lane broke"));
  }
  std::shared_ptr<Transfer> transfer;
};

TEST(PeerOrphans, AreUnsettledUntilThePeerIsClosed) {
  QuietEngine quiet;
  const Orphan orphan(quiet.peer);
  EXPECT_EQ(orphan.transfer->state(), MP_UNSETTLED);
  EXPECT_EQ(orphan.transfer->error().code, MP_PEER_LOST);
  quiet.peer->close(make_error(MP_CLOSED, "closed"));
  EXPECT_EQ(orphan.transfer->state(), MP_FAILED);
  EXPECT_EQ(orphan.transfer->error().code, MP_PEER_LOST);
}

// The handshake of the new connection has ended everything of the old one.
TEST(PeerOrphans, ThatComeAfterTheNextHandshakeAreSettledAtOnce) {
  TestEngine target, source;
  const PeerHandle peer = source.connect(target);
  const Orphan orphan(peer->peer);
  EXPECT_EQ(orphan.transfer->state(), MP_FAILED);
}

}  // namespace
}  // namespace moonpool
