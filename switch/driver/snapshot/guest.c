// SPDX-License-Identifier: GPL-2.0-only
/*
 * A machine that goes on as a guest: a monitor runs it on another machine (switch/abi/src/guest.rs). Its
 * image needs the memory of its firmware. Its PCI devices are gone, as if they were pulled out while it
 * slept, and virtio devices come.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/acpi.h>
#include <linux/blkdev.h>
#include <linux/efi.h>
#include <linux/interrupt.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/uaccess.h>
#include <linux/umh.h>
#include <linux/workqueue.h>
#include <scsi/scsi_device.h>
#include <asm/e820/api.h>

#include "snapshot.h"

/* The name of the devices that are made. */
#define VIRTIO	"virtio-mmio"
/* The program that carries out the host's orders, and the most words of one. */
#define COMMAND	"/usr/sbin/mercury"
#define WORDS	32

static struct {
	/* The devices that the monitor offers; none: there is no monitor. */
	struct mercury_guest_description offered;
	/* The firmware of an earlier machine could be called. */
	bool had_firmware;
	/* The interrupt of the doorbell; 0: there is none. */
	int irq;
	u32 gsi;
} guest;

/*
 * Returns true for memory that the firmware left for itself. What it has reserved may be registers, so user
 * space asks for reserved ranges only if a table of ACPI's lies there.
 */
static bool is_firmware(u64 page)
{
	if (!PAGE_ALIGNED(page) || page_is_ram(PHYS_PFN(page)))
		return false;
	return page < SZ_1M || (e820__mapped_any(page, page + PAGE_SIZE, 0) &&
				!mercury_is_device(page, page + PAGE_SIZE));
}

/* Reads a page of it for user space, which cannot: the kernel has marked it busy. */
int mercury_firmware_read(const struct mercury_firmware_request *request)
{
	void __iomem *page;
	int result = MERCURY_CODE_OK;

	if (!is_firmware(request->page_phys))
		return MERCURY_CODE_BAD_ARGUMENT;
	page = ioremap_cache(request->page_phys, PAGE_SIZE);
	if (!page)
		return MERCURY_CODE_NO_MEMORY;
	if (copy_to_user(u64_to_user_ptr(request->data_addr), (void __force *)page, PAGE_SIZE))
		result = -EFAULT;
	iounmap(page);
	return result;
}

static bool has_monitor(void)
{
	u32 eax, ebx, ecx, edx;

	cpuid(MERCURY_GUEST_LEAF, &eax, &ebx, &ecx, &edx);
	return ebx == MERCURY_GUEST_SIGNATURE_EBX && ecx == MERCURY_GUEST_SIGNATURE_ECX &&
	       edx == MERCURY_GUEST_SIGNATURE_EDX;
}

/* Finds out by what port the monitor answers calls, if there is one that does. */
void mercury_guest_find_monitor(void)
{
	mercury.monitor_port = has_monitor() ? cpuid_ecx(MERCURY_GUEST_LEAF_DESCRIPTION) : 0;
}

/* Reads from the page in which the monitor describes itself. */
static void read_page(unsigned int offset, void *to, size_t length)
{
	u64 phys = cpuid_eax(MERCURY_GUEST_LEAF_DESCRIPTION) |
		   (u64)cpuid_ebx(MERCURY_GUEST_LEAF_DESCRIPTION) << 32;
	void __iomem *page = ioremap_cache(phys, PAGE_SIZE);

	if (page) {
		memcpy_fromio(to, page + offset, length);
		iounmap(page);
	}
}

/* Reads what the monitor offers. */
static void read_offer(void)
{
	struct mercury_guest_description *offered = &guest.offered;

	read_page(0, offered, sizeof(*offered));
	if (offered->magic == MERCURY_GUEST_MAGIC && offered->version == MERCURY_GUEST_VERSION &&
	    offered->count <= MERCURY_GUEST_SLOTS_MAX)
		return;
	pr_err("the monitor offers no devices that this driver understands\n");
	memset(offered, 0, sizeof(*offered));
}

/* Bridges stay, and a bus of sensors: a rescan finds what is below them where it was. */
static bool is_gone(struct pci_dev *device)
{
	u32 id = U32_MAX;

	pci_bus_read_config_dword(device->bus, device->devfn, PCI_VENDOR_ID, &id);
	return id == U32_MAX && device->class >> 16 != PCI_BASE_CLASS_BRIDGE &&
	       device->class >> 8 != PCI_CLASS_SERIAL_SMBUS;
}

/* Returns true for a device that was made of a slot, in this guest or in an earlier one. */
static bool is_of_slot(struct device *device)
{
	const struct platform_device *platform = to_platform_device(device);

	return platform->id_auto && dev_get_platdata(device) && !strcmp(platform->name, VIRTIO);
}

static int is_at(struct device *device, const void *window)
{
	return is_of_slot(device) && to_platform_device(device)->resource[0].start == *(const u64 *)window;
}

/* Returns true for such a device that this monitor does not have, and bare metal neither. */
static int is_absent(struct device *device, const void *unused)
{
	unsigned int i;

	for (i = 0; i < guest.offered.count; i++)
		if (is_at(device, &guest.offered.slots[i].window_phys))
			return false;
	return is_of_slot(device);
}

/*
 * Leaves a device asleep, with all below it. Its driver would wait for it to wake up, some for many seconds,
 * and the machine with it.
 */
static int let_sleep(struct device *device, void *unused)
{
	dev_pm_syscore_device(device, true);
	return device_for_each_child(device, NULL, let_sleep);
}

static void let_gone_sleep(void)
{
	struct pci_dev *device = NULL;

	for_each_pci_dev(device) {
		if (!is_gone(device))
			continue;
		device->error_state = pci_channel_io_perm_failure;
		let_sleep(&device->dev, NULL);
	}
}

static int let_wake(struct device *device, void *unused)
{
	return is_absent(device, NULL) ? device_for_each_child(device, NULL, mercury_absent) : 0;
}

/* UEFI's functions lie in memory that the image does not have. Kernels without EFI have no `efi` either. */
static void change_firmware(void)
{
	if (!IS_ENABLED(CONFIG_EFI))
		return;
	if (has_monitor())
		guest.had_firmware |= test_and_clear_bit(EFI_RUNTIME_SERVICES, &efi.flags);
	else if (guest.had_firmware)
		set_bit(EFI_RUNTIME_SERVICES, &efi.flags);
}

/* In a machine that goes on from an image, before its devices wake up. */
void mercury_guest_wake(void)
{
	memset(&guest.offered, 0, sizeof(guest.offered));
	change_firmware();
	if (has_monitor()) {
		read_offer();
		let_gone_sleep();
	}
	bus_for_each_dev(&platform_bus_type, NULL, NULL, let_wake);
}

/*
 * Has SCSI disks fail at once. They are as quiet as the instant left them, and their removal would wait for
 * what it writes to them. A blocked disk is removed without that.
 */
static int let_fail(struct device *device, void *unused)
{
	if (device->type && device->type->name && !strcmp(device->type->name, "scsi_device")) {
		struct scsi_device *disk = to_scsi_device(device);

		if (disk->quiesced_by)
			blk_clear_pm_only(disk->request_queue);
		disk->quiesced_by = NULL;
		disk->sdev_state = SDEV_BLOCK;
	}
	return device_for_each_child(device, NULL, let_fail);
}

/* After a device that is no more the loop begins anew. */
static void remove_gone(void)
{
	struct pci_dev *device = NULL;

	for_each_pci_dev(device) {
		if (device->error_state != pci_channel_io_perm_failure)
			continue;
		pr_info("PCI device %s is gone\n", pci_name(device));
		/* Its sleep may have disabled it, and its removal does so as well. */
		atomic_cmpxchg(&device->enable_cnt, 0, 1);
		let_fail(&device->dev, NULL);
		pci_stop_and_remove_bus_device_locked(device);
	}
}

/* A device whose driver has not woken up would fail at its removal, and stays. */
static void remove_absent(void)
{
	struct device *device;

	while (mercury_absent_are_awake() &&
	       (device = bus_find_device(&platform_bus_type, NULL, NULL, is_absent))) {
		platform_device_unregister(to_platform_device(device));
		acpi_unregister_gsi(*(const u32 *)dev_get_platdata(device));
		put_device(device);
	}
}

/* Makes a device of a slot, unless an earlier guest has had it. */
static void make_device(const struct mercury_guest_slot *slot)
{
	struct device *earlier = bus_find_device(&platform_bus_type, NULL, &slot->window_phys, is_at);
	int irq = earlier ? 0 : acpi_register_gsi(NULL, slot->gsi, ACPI_EDGE_SENSITIVE, ACPI_ACTIVE_HIGH);
	struct resource resources[] = {
		DEFINE_RES_MEM(slot->window_phys, slot->window_bytes),
		DEFINE_RES_IRQ(irq),
	};
	struct platform_device *device = ERR_PTR(irq);

	put_device(earlier);
	if (earlier)
		return;
	if (irq >= 0)
		device = platform_device_register_resndata(NULL, VIRTIO, PLATFORM_DEVID_AUTO, resources,
							   ARRAY_SIZE(resources), &slot->gsi,
							   sizeof(slot->gsi));
	if (IS_ERR(device))
		pr_err("virtio device %u cannot come: %ld\n", slot->device, PTR_ERR(device));
	else
		pr_info("virtio device %u comes at %#llx\n", slot->device, slot->window_phys);
}

/* Starts the command with the words of the host's operator. The monitor hears of it if that fails. */
static void obey(struct work_struct *unused)
{
	char *envp[4] = { NULL, "HOME=/", "PATH=/usr/sbin:/usr/bin:/sbin:/bin" };
	char *order = kzalloc(MERCURY_GUEST_ORDER_MAX + 2, GFP_KERNEL), *word = order;
	char *argv[WORDS + 2] = { COMMAND };
	int i, err = -ENOMEM;

	if (order) {
		read_page(MERCURY_GUEST_ORDER, order, MERCURY_GUEST_ORDER_MAX);
		envp[0] = order;
		for (i = 1; i <= WORDS && *(word += strlen(word) + 1); i++)
			argv[i] = word;
		err = call_usermodehelper(COMMAND, argv, envp, UMH_WAIT_EXEC);
	}
	if (err)
		outl(-err, mercury.monitor_port + MERCURY_GUEST_ANSWER);
	kfree_sensitive(order);
}

static DECLARE_WORK(order, obey);

static irqreturn_t rang(int irq, void *unused)
{
	schedule_work(&order);
	return IRQ_HANDLED;
}

/* Listens to the doorbell of the monitor, if it has one, and no more to that of an earlier one. */
static void listen(void)
{
	if (guest.irq > 0) {
		free_irq(guest.irq, &guest);
		acpi_unregister_gsi(guest.gsi);
	}
	guest.gsi = guest.offered.doorbell_gsi;
	guest.irq = 0;
	if (guest.gsi)
		guest.irq = acpi_register_gsi(NULL, guest.gsi, ACPI_EDGE_SENSITIVE, ACPI_ACTIVE_HIGH);
	if (guest.irq > 0 && request_irq(guest.irq, rang, 0, "mercury", &guest))
		guest.irq = 0;
	if (guest.gsi && guest.irq <= 0)
		pr_err("the host cannot order a move of this guest: interrupt %u is not free\n", guest.gsi);
}

/* When the module starts, perhaps in a guest. */
void mercury_guest_init(void)
{
	mercury_guest_find_monitor();
	if (has_monitor())
		read_offer();
	listen();
}

void mercury_guest_exit(void)
{
	guest.offered.doorbell_gsi = 0;
	listen();
	cancel_work_sync(&order);
}

/* In a machine that goes on from an image, when its devices are awake and before its applications go on. */
void mercury_guest_arrive(void)
{
	unsigned int i;

	remove_absent();
	listen();
	if (!has_monitor())
		return;
	remove_gone();
	for (i = 0; i < guest.offered.count; i++)
		make_device(&guest.offered.slots[i]);
	pr_info("the machine goes on as a guest, with %u virtio devices\n", guest.offered.count);
}
