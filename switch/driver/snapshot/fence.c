// SPDX-License-Identifier: GPL-2.0-only
/*
 * The fence. A machine that goes on elsewhere, or later, from an instant must not talk after that instant:
 * the kernel would acknowledge packets that never arrived in the machine that goes on. So packets are lost
 * from then on, in all network namespaces. Excepted are the loopback's and those of the peers over which
 * the image travels. Other peers get no answer, and send again.
 *
 * A machine that comes back to an instant, and has talked since, must be silent as well until all that it
 * would say twice has ended (nonces.c). There the fence closes before devices resume.
 *
 * The hooks are there before the instant, and idle. They are switched on after the instant with all CPUs in
 * stop_machine(): no packet passes in between, and in the image they are idle.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/atomic.h>
#include <linux/icmpv6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/netfilter.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/skbuff.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <net/ip.h>
#include <net/ipv6.h>
#include <net/net_namespace.h>

#include "snapshot.h"

static struct {
	bool up;
	bool closed;
	/* The fence stays when the process that raised it is gone. */
	bool stays;
	/*
	 * The fence is closed in the machine that comes back; it is open in the machine that goes on here.
	 */
	bool returns, open_here;
	struct mercury_fence_peer *peers;
	u32 peer_count;
	atomic64_t stopped;
} fence;

#ifdef CONFIG_NETFILTER

/* The address of the other end. */
static const void *remote_of(const struct sk_buff *skb, bool incoming, u32 version)
{
	if (version == 4)
		return incoming ? &ip_hdr(skb)->saddr : &ip_hdr(skb)->daddr;
	return incoming ? &ipv6_hdr(skb)->saddr : &ipv6_hdr(skb)->daddr;
}

/* Returns the offset of the header after IP's, and its protocol; negative: it is not in this packet. */
static int payload_of(const struct sk_buff *skb, u32 version, u8 *protocol)
{
	__be16 fragment = 0;
	int offset;

	if (version == 4) {
		*protocol = ip_hdr(skb)->protocol;
		fragment = ip_hdr(skb)->frag_off & htons(IP_OFFSET);
		offset = skb_network_offset(skb) + ip_hdrlen(skb);
	} else {
		*protocol = ipv6_hdr(skb)->nexthdr;
		offset = ipv6_skip_exthdr(skb, skb_network_offset(skb) + sizeof(struct ipv6hdr),
					  protocol, &fragment);
		fragment &= htons(IP6_OFFSET);
	}
	return fragment ? -1 : offset;
}

static bool has_port(const struct sk_buff *skb, bool incoming, u32 version, u32 port)
{
	__be16 room[2];
	const __be16 *ports;
	u8 protocol;
	int offset = payload_of(skb, version, &protocol);

	if (offset < 0 || (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP))
		return false;
	/* Source, destination: both have them there. */
	ports = skb_header_pointer(skb, offset, sizeof(room), room);
	return ports && ntohs(ports[incoming ? 0 : 1]) == port;
}

static bool is_let_through(const struct sk_buff *skb, bool incoming, u32 version)
{
	const void *remote = remote_of(skb, incoming, version);
	size_t length = version == 4 ? sizeof(struct in_addr) : sizeof(struct in6_addr);
	u32 i;

	for (i = 0; i < fence.peer_count; i++) {
		const struct mercury_fence_peer *peer = &fence.peers[i];

		if (peer->version == version && !memcmp(remote, peer->address, length) &&
		    (!peer->port || has_port(skb, incoming, version, peer->port)))
			return true;
	}
	return false;
}

/* Without these no peer is found; IPv4 has ARP for it, which does not come here. */
static bool is_discovery(const struct sk_buff *skb)
{
	u8 room, protocol;
	const u8 *type;
	int offset = payload_of(skb, 6, &protocol);

	if (offset < 0 || protocol != IPPROTO_ICMPV6)
		return false;
	type = skb_header_pointer(skb, offset, sizeof(room), &room);
	/* Router solicitation to redirect, RFC 4861 */
	return type && *type >= 133 && *type <= 137;
}

static unsigned int pass(void *unused, struct sk_buff *skb, const struct nf_hook_state *state)
{
	bool incoming = state->hook == NF_INET_PRE_ROUTING;
	const struct net_device *device = incoming ? state->in : state->out;
	u32 version = state->pf == NFPROTO_IPV4 ? 4 : 6;

	if (likely(!READ_ONCE(fence.closed)))
		return NF_ACCEPT;
	if (device && device->flags & IFF_LOOPBACK)
		return NF_ACCEPT;
	if (is_let_through(skb, incoming, version))
		return NF_ACCEPT;
	/* After the commit another machine may have the addresses: this one neither asks nor answers. */
	if (version == 6 && !READ_ONCE(fence.stays) && is_discovery(skb))
		return NF_ACCEPT;
	/* The sender sees a lost packet, and no refusal. */
	atomic64_inc(&fence.stopped);
	kfree_skb(skb);
	return NF_STOLEN;
}

#define HOOK(family, number) { .hook = pass, .pf = family, .hooknum = number, .priority = INT_MIN }
static const struct nf_hook_ops hooks[] = {
	HOOK(NFPROTO_IPV4, NF_INET_PRE_ROUTING),
	HOOK(NFPROTO_IPV4, NF_INET_LOCAL_OUT),
#if IS_ENABLED(CONFIG_IPV6)
	HOOK(NFPROTO_IPV6, NF_INET_PRE_ROUTING),
	HOOK(NFPROTO_IPV6, NF_INET_LOCAL_OUT),
#endif
};

/* Not __net_init: without network namespaces that is __init, and the fence is raised long after that. */
static int add(struct net *net)
{
	return nf_register_net_hooks(net, hooks, ARRAY_SIZE(hooks));
}

static void remove(struct net *net)
{
	nf_unregister_net_hooks(net, hooks, ARRAY_SIZE(hooks));
}

static struct pernet_operations namespaces = { .init = add, .exit = remove };

static u32 raise(void)
{
	return register_pernet_subsys(&namespaces) ? MERCURY_CODE_NO_MEMORY : MERCURY_CODE_OK;
}

static void lower(void)
{
	unregister_pernet_subsys(&namespaces);
}

#else

static u32 raise(void)
{
	return MERCURY_CODE_FENCE_UNSUPPORTED;
}

static void lower(void)
{
}

#endif /* CONFIG_NETFILTER */

/* Under mercury.lock; if it is up. */
static void take_down(void)
{
	if (!fence.up)
		return;
	/* A packet may be on its way through it. */
	WRITE_ONCE(fence.closed, false);
	lower();
	synchronize_net();
	if (fence.stays)
		module_put(THIS_MODULE);
	kfree(fence.peers);
	memset(&fence, 0, sizeof(fence));
}

/* Under mercury.lock: the process that raised it is gone. */
void mercury_fence_release(void)
{
	if (!fence.stays)
		take_down();
}

/* Under mercury.lock, in a machine that was brought back: the command opens a fence that is closed there. */
void mercury_fence_arrive(void)
{
	if (!fence.returns)
		take_down();
}

/* With all CPUs in stop_machine(), in the machine that does not come back. */
void mercury_fence_close(void)
{
	WRITE_ONCE(fence.closed, fence.up && !fence.open_here);
}

/*
 * With all CPUs in stop_machine(), in a machine that has come back: peers know it from the life that has
 * ended.
 */
void mercury_fence_return(void)
{
	if (!fence.returns)
		return;
	fence.peer_count = 0;
	WRITE_ONCE(fence.closed, fence.up);
}

static int read_peers(const struct mercury_fence_request *request)
{
	u32 i;

	fence.peers = memdup_user(u64_to_user_ptr(request->peers_addr),
				  request->peers_count * sizeof(*fence.peers));
	if (IS_ERR(fence.peers))
		return PTR_ERR(fence.peers);
	for (i = 0; i < request->peers_count; i++) {
		u32 version = fence.peers[i].version;

		if ((version != 4 && version != 6) || fence.peers[i].port > U16_MAX)
			return MERCURY_CODE_BAD_ARGUMENT;
	}
	fence.peer_count = request->peers_count;
	return MERCURY_CODE_OK;
}

/* Raises the fence, changes it or takes it down; under mercury.lock. */
int mercury_fence(struct mercury_fence_request *request)
{
	u64 known = MERCURY_FENCE_DOWN | MERCURY_FENCE_STAYS | MERCURY_FENCE_RETURN |
		    MERCURY_FENCE_OPEN_HERE | MERCURY_FENCE_FORGET;
	int result;

	if (request->flags & ~known || request->reserved ||
	    request->peers_count > MERCURY_FENCE_PEERS_MAX)
		return MERCURY_CODE_BAD_ARGUMENT;
	request->stopped = atomic64_read(&fence.stopped);
	if (request->flags & MERCURY_FENCE_STAYS) {
		if (!fence.up)
			return MERCURY_CODE_BAD_ARGUMENT;
		/* Another machine has the addresses: not even a forced removal of the module opens it. */
		if (!fence.stays)
			__module_get(THIS_MODULE);
		fence.stays = true;
		return MERCURY_CODE_OK;
	}
	if (request->flags & MERCURY_FENCE_FORGET)
		mercury_nonces_forget();
	take_down();
	if (request->flags & MERCURY_FENCE_DOWN)
		return MERCURY_CODE_OK;
	result = request->peers_count ? read_peers(request) : MERCURY_CODE_OK;
	if (result == MERCURY_CODE_OK)
		result = raise();
	if (result == MERCURY_CODE_OK) {
		fence.returns = request->flags & MERCURY_FENCE_RETURN;
		fence.open_here = request->flags & MERCURY_FENCE_OPEN_HERE;
		fence.up = true;
	} else {
		if (!IS_ERR(fence.peers))
			kfree(fence.peers);
		memset(&fence, 0, sizeof(fence));
	}
	return result;
}
