// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory that the firmware's map does not have. A DIMM in a slot for hotplug is there after a power cycle,
 * and ACPI describes it: the restore environment, whose kernel does not use it, finds it there. Other
 * memory of that kind depends on a driver that makes it available after each boot (virtio-mem, Hyper-V's,
 * CXL's): in the restore environment it is missing.
 */
#include <linux/acpi.h>
#include <linux/ioport.h>
#include <linux/limits.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/slab.h>
#include <asm/e820/api.h>

#include "snapshot.h"

/* Ranges of the memory devices of ACPI: more than any machine has. */
#define DEVICES_MAX	4096
#define DEVICE_ID	"PNP0C80"
/* Memory is plugged in by whole sections at least. */
#define SECTION_SIZE	BIT_ULL(SECTION_SIZE_BITS)

struct dimm {
	u64 start, end;
};

struct plugged {
	unsigned int count;
	struct dimm dimms[DEVICES_MAX];
};

#ifdef CONFIG_ACPI

static acpi_status add_resource(struct acpi_resource *resource, void *argument)
{
	struct plugged *plugged = argument;
	struct acpi_resource_address64 address;
	struct dimm *dimm = &plugged->dimms[plugged->count];

	if (ACPI_FAILURE(acpi_resource_to_address64(resource, &address)) ||
	    address.resource_type != ACPI_MEMORY_RANGE || !address.address.address_length)
		return AE_OK;
	if (plugged->count == DEVICES_MAX)
		return AE_LIMIT;
	dimm->start = address.address.minimum;
	dimm->end = dimm->start + address.address.address_length;
	plugged->count++;
	return AE_OK;
}

static acpi_status add_device(acpi_handle handle, u32 level, void *plugged, void **unused)
{
	unsigned long long status;

	if (ACPI_SUCCESS(acpi_bus_get_status_handle(handle, &status)) &&
	    status & ACPI_STA_DEVICE_PRESENT && status & ACPI_STA_DEVICE_ENABLED)
		acpi_walk_resources(handle, METHOD_NAME__CRS, add_resource, plugged);
	return AE_OK;
}

static void find_devices(struct plugged *plugged)
{
	acpi_get_devices(DEVICE_ID, add_device, plugged, NULL);
}

#else

static void find_devices(struct plugged *plugged)
{
}

#endif

/* The map that the firmware gave at boot, whatever mem= left of it. */
static bool is_firmwares(u64 start, u64 end)
{
	static const enum e820_type types[] = { E820_TYPE_RAM, E820_TYPE_SOFT_RESERVED, E820_TYPE_PMEM,
						E820_TYPE_PRAM };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(types); i++)
		if (e820__mapped_raw_any(start, end, types[i]))
			return true;
	return false;
}

/* Returns the end of the device of ACPI's that has memory from `start` on, or `start` if none has. */
static u64 end_of_device(const struct plugged *plugged, u64 start)
{
	unsigned int i;

	for (i = 0; i < plugged->count; i++)
		if (start >= plugged->dimms[i].start && start < plugged->dimms[i].end)
			return plugged->dimms[i].end;
	return start;
}

static u32 check(const struct plugged *plugged, const struct mercury_owned_range *range,
		 struct mercury_outcome *outcome)
{
	u64 start = range->start_phys, end = start + range->pages * PAGE_SIZE;

	while (start < end) {
		u64 next = end_of_device(plugged, start);

		if (next == start) {
			next = min(end, ALIGN(start + 1, SECTION_SIZE));
			if (!is_firmwares(start, next)) {
				outcome->detail[0] = start;
				outcome->detail[1] = end;
				return MERCURY_CODE_RESTORE_MEMORY;
			}
		}
		start = next;
	}
	return MERCURY_CODE_OK;
}

/*
 * Refuses ranges of memory that the restore environment does not find in full. Each has so many bytes, and
 * begins like a struct mercury_owned_range. May sleep.
 */
u32 mercury_plugged_check(const void *ranges, size_t bytes, u32 count, struct mercury_outcome *outcome)
{
	struct plugged *plugged = kvzalloc(sizeof(*plugged), GFP_KERNEL);
	u32 code = MERCURY_CODE_OK;

	if (!plugged)
		return MERCURY_CODE_NO_MEMORY;
	find_devices(plugged);
	for (; count && code == MERCURY_CODE_OK; count--, ranges += bytes)
		code = check(plugged, ranges, outcome);
	kvfree(plugged);
	return code;
}
