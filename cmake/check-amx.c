// exit code 0: the compiler does not use AMX on this machine, or AMX works
//
// Written as ggml does it (ggml-cpu/amx/mmq.cpp): some versions of GCC drop stores to the configuration, since their
// _tile_loadconfig() claims to read only its first bytes, and the processor faults.
#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA  18

struct tile_config {
    uint8_t  palette_id;
    uint8_t  start_row;
    uint8_t  reserved[14];
    uint16_t colsb[16];
    uint8_t  rows[16];
};

// something to find on the stack
static __attribute__((noinline)) int fill_stack(int n) {
    volatile unsigned char data[4096];
    for (int i = 0; i < 4096; ++i) {
        data[i] = 0xff;
    }
    return data[n & 4095];
}

static __attribute__((noinline)) void use_tiles(void) {
    _Alignas(64) struct tile_config tc = { 0 };
    tc.palette_id = 1;
    for (int i = 0; i < 8; ++i) {
        tc.rows [i] = 16;
        tc.colsb[i] = 64;
    }
    _tile_loadconfig(&tc);
    _tile_zero(0);
    _tile_release();
}

int main(int argc, char ** argv) {
    (void) argv;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) {
        return 1;
    }
    fill_stack(argc);
    use_tiles();
    return 0;
}
#else
int main(void) {
    return 0;
}
#endif
