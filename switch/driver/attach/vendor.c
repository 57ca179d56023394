// SPDX-License-Identifier: GPL-2.0-only
/* Whose hardware virtualization this machine has: the one place where the driver asks. */
#include <asm/processor.h>

#include "attach.h"

const struct mercury_vendor *mercury_vendor __ro_after_init;

void __init mercury_vendor_init(void)
{
	switch (boot_cpu_data.x86_vendor) {
	case X86_VENDOR_AMD:
	case X86_VENDOR_HYGON:
		mercury_vendor = &mercury_svm;
		break;
	case X86_VENDOR_INTEL:
		mercury_vendor = &mercury_vmx;
		break;
	}
}
