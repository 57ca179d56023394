// SPDX-License-Identifier: GPL-2.0-only
/*
 * Encryption of the kernel's whose counters must not run twice.
 *
 * A machine that goes back to an instant encrypts with the counters of that instant. If it has talked
 * meanwhile with the same keys, two packets are encrypted with one nonce, which gives away both, and for
 * AES-GCM the key that authenticates. So IPsec's security associations are ended: the daemon that
 * negotiates keys makes new ones. MACsec's cannot be ended by a module, and even ARP counts, so that a
 * machine with MACsec has no snapshot.
 *
 * WireGuard forgets its keys when the freeze begins. A tunnel at work can agree on new ones before all
 * stands still, so it is told once more to forget them when its queues for handshakes are frozen.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/netdevice.h>
#include <linux/notifier.h>
#include <linux/rcupdate.h>
#include <linux/rwsem.h>
#include <linux/string.h>
#include <linux/suspend.h>
#include <net/net_namespace.h>
#include <net/xfrm.h>

#include "snapshot.h"

/* Returns true if a device of MACsec is there, in any network namespace. */
static bool has_macsec(void)
{
	struct net_device *device;
	bool found = false;
	struct net *net;

	down_read(&net_rwsem);
	rcu_read_lock();
	for_each_net(net)
		for_each_netdev_rcu(net, device)
			found |= netif_is_macsec(device);
	rcu_read_unlock();
	up_read(&net_rwsem);
	return found;
}

u32 mercury_nonces_check(void)
{
	return has_macsec() ? MERCURY_CODE_MACSEC_IN_USE : MERCURY_CODE_OK;
}

static int begins(struct notifier_block *block, unsigned long action, void *data)
{
	return NOTIFY_DONE;
}

/* The first in the kernel's list of those that are told of a freeze: it leads to all others. */
static struct notifier_block first = { .notifier_call = begins, .priority = INT_MAX };

/*
 * With tasks and their work frozen, in a task that may sleep: has WireGuard forget its keys again. No new
 * ones are agreed on until all thaws.
 */
int mercury_nonces_forget_tunnels(void)
{
	int err = register_pm_notifier(&first);
	struct notifier_block *block;
	char name[32];

	if (err)
		return err;
	for (block = rcu_dereference_raw(first.next); block; block = rcu_dereference_raw(block->next)) {
		snprintf(name, sizeof(name), "%ps", block->notifier_call);
		if (strstarts(name, "wg_pm_notification"))
			block->notifier_call(block, PM_HIBERNATION_PREPARE, NULL);
	}
	return unregister_pm_notifier(&first);
}

#ifdef CONFIG_XFRM

static int flush(struct net *net)
{
#ifdef MERCURY_XFRM_SYNC
	return xfrm_state_flush(net, 0, false, false);
#else
	return xfrm_state_flush(net, 0, false);
#endif
}

/* Ends all security associations of IPsec, in all network namespaces, and tells the daemons. */
void mercury_nonces_forget(void)
{
	struct net *net;

	down_read(&net_rwsem);
	for_each_net(net) {
		struct km_event event = { .event = XFRM_MSG_FLUSHSA, .net = net };

		/* Negative: there are none. */
		if (!flush(net))
			km_state_notify(NULL, &event);
	}
	up_read(&net_rwsem);
}

#else

void mercury_nonces_forget(void)
{
}

#endif
