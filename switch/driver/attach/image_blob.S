/* SPDX-License-Identifier: GPL-2.0-only */
/* The hypervisor's flat image, as the build gave it. Read-only: image.c copies it. */
#include <linux/linkage.h>

	.section .rodata, "a", @progbits
	.balign	8
SYM_DATA_START(mercury_image)
	.incbin	MERCURY_HYPERVISOR_BIN
SYM_DATA_END_LABEL(mercury_image, SYM_L_GLOBAL, mercury_image_end)
