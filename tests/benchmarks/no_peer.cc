// A library that is no peer.
extern "C" int lacuna_is_no_peer(void);
extern "C" int lacuna_is_no_peer(void) { return 1; }
