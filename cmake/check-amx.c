// exit code 0: the compiler does not use AMX on this machine, or AMX works
#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA  18

int main(void) {
    unsigned char config[64];

    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) {
        return 1;
    }

    memset(config, 0, sizeof(config));
    config[ 0] = 1;  // palette
    config[16] = 64; // bytes per row of tile 0
    config[48] = 16; // rows of tile 0

    _tile_loadconfig(config);
    _tile_zero(0);
    _tile_release();

    return 0;
}
#else
int main(void) {
    return 0;
}
#endif
