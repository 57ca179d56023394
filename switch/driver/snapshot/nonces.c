// SPDX-License-Identifier: GPL-2.0-only
/*
 * Encryption of the kernel's whose counters must not run twice.
 *
 * A machine that goes back to an instant encrypts with the counters of that instant. If it has talked
 * meanwhile with the same keys, two packets are encrypted with one nonce, which gives away both, and for
 * AES-GCM the key that authenticates. So IPsec's security associations are ended: the daemon that
 * negotiates keys makes new ones. MACsec's cannot be ended by a module, and even ARP counts, so that a
 * machine with MACsec has no snapshot. WireGuard forgets its keys when the freeze begins. A tunnel at work
 * can agree on new ones before all stands still: those run twice.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/netdevice.h>
#include <linux/rwsem.h>
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
