/* SPDX-License-Identifier: Apache-2.0
 *
 * A C program that knows only the installed header and library: two engines, one read, every byte checked.
 */
#include <moonpool/engine.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBlockBytes = 65536, kBlocks = 16, kWanted = 3 };

static void check(mp_status status, const mp_error *error, const char *what) {
  if (status == MP_OK) return;
  fprintf(stderr, "%s: %d: %s (%s)\n", what, (int)status, error->message, error->cause);
  exit(1);
}

static mp_engine *open_engine(const char *name, const char *listen, const char *transports) {
  mp_error error = {0};
  mp_config config;
  mp_config_init(&config);
  config.name = name;
  config.listen = listen;
  config.transports = transports;
  mp_engine *engine = NULL;
  check(mp_engine_open(&config, &engine, &error), &error, "open");
  return engine;
}

int main(int argc, char **argv) {
  const char *transports = argc > 1 ? argv[1] : "auto";
  mp_error error = {0};
  mp_engine *server = open_engine("server", "127.0.0.1:0", transports);
  mp_engine *client = open_engine("client", NULL, transports);

  mp_region *source = NULL;
  check(mp_region_allocate(server, kBlocks * kBlockBytes, "kv", NULL, &source, &error), &error, "allocate");
  mp_region_info info;
  mp_region_get_info(source, &info);
  for (int block = 0; block < kBlocks; ++block) {
    memset((char *)info.address + (size_t)block * kBlockBytes, block + 1, kBlockBytes);
  }

  unsigned char *target_memory = calloc(kWanted, kBlockBytes);
  mp_region *target = NULL;
  check(mp_region_register(client, target_memory, kWanted * kBlockBytes, NULL, MP_REGION_WRITABLE, &target, &error),
        &error, "register");

  mp_peer *peer = NULL;
  check(mp_peer_connect(client, mp_engine_address(server), 5000, NULL, NULL, &peer, &error), &error, "connect");
  mp_remote_region remote;
  check(mp_peer_find_region(peer, "kv", 5000000000, &remote, &error), &error, "find");

  const int64_t wanted[kWanted] = {12 * kBlockBytes, 0, 5 * kBlockBytes};
  const int64_t places[kWanted] = {0, kBlockBytes, 2 * kBlockBytes};
  const int64_t length = kBlockBytes;
  const mp_remote_region *remotes[] = {&remote};
  mp_batch batch = {0};
  batch.count = kWanted;
  batch.local_offsets = places;
  batch.local_offsets_stride = 1;
  batch.remote_offsets = wanted;
  batch.remote_offsets_stride = 1;
  batch.lengths = &length;
  batch.lengths_stride = 0;
  batch.locals = &target;
  batch.locals_count = 1;
  batch.remotes = remotes;
  batch.remotes_count = 1;

  mp_options options = {0};
  options.deadline_ns = 10000000000;
  mp_transfer *transfer = NULL;
  check(mp_submit(peer, MP_READ, &batch, &options, &transfer, &error), &error, "submit");
  check(mp_transfer_wait(transfer, -1), &error, "wait");
  if (mp_transfer_get_state(transfer) != MP_COMPLETED) {
    mp_transfer_get_error(transfer, &error);
    check((mp_status)error.code, &error, "transfer");
  }
  for (int i = 0; i < kWanted; ++i) {
    const unsigned char expected = (unsigned char)(wanted[i] / kBlockBytes + 1);
    for (int at = 0; at < kBlockBytes; ++at) {
      if (target_memory[i * kBlockBytes + at] != expected) {
        fprintf(stderr, "block %d, byte %d: %d instead of %d\n", i, at, target_memory[i * kBlockBytes + at], expected);
        return 1;
      }
    }
  }

  mp_peer_info peer_info;
  mp_peer_get_info(peer, &peer_info);
  mp_transfer_free(transfer);
  check(mp_region_release(target, &error), &error, "release");
  mp_region_free(target);
  mp_region_free(source);
  mp_peer_free(peer);
  mp_engine_free(client);
  mp_engine_free(server);
  free(target_memory);
  printf("%d blocks over %s\n", kWanted, peer_info.path);
  return 0;
}
