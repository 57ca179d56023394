// SPDX-License-Identifier: GPL-2.0-only
/*
 * Another hypervisor's module, as far as Mercury sees it: the name, and with hold=1 the change of
 * each CPU when the module takes SVM or VMX. The load is refused where the hardware is taken already.
 */
#include <linux/cpu.h>
#include <linux/module.h>
#include <linux/smp.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/tlbflush.h>

static bool hold;
module_param(hold, bool, 0444);

static bool is_amd(void)
{
	return boot_cpu_data.x86_vendor == X86_VENDOR_AMD;
}

static bool is_on(void)
{
	u64 efer;

	if (!is_amd())
		return native_read_cr4() & X86_CR4_VMXE;
	rdmsrl(MSR_EFER, efer);
	return efer & EFER_SVME;
}

static void look(void *taken)
{
	if (is_on())
		WRITE_ONCE(*(bool *)taken, true);
}

static void set(void *on)
{
	u64 efer;

	if (!is_amd()) {
		cr4_update_irqsoff(on ? X86_CR4_VMXE : 0, on ? 0 : X86_CR4_VMXE);
		return;
	}
	rdmsrl(MSR_EFER, efer);
	wrmsrl(MSR_EFER, on ? efer | EFER_SVME : efer & ~(u64)EFER_SVME);
}

static int __init rival_init(void)
{
	bool taken = false;

	if (!hold)
		return 0;
	on_each_cpu(look, &taken, 1);
	if (taken)
		return -EBUSY;
	on_each_cpu(set, &hold, 1);
	return 0;
}

static void __exit rival_exit(void)
{
	if (hold)
		on_each_cpu(set, NULL, 1);
}

module_init(rival_init);
module_exit(rival_exit);

MODULE_DESCRIPTION("Stands for another hypervisor in tests of Mercury");
MODULE_AUTHOR("The Mercury authors");
MODULE_LICENSE("GPL");
