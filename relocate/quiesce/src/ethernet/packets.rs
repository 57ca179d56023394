//! Broadcast frames on Ethernet, for words that must be heard without an address of the receiver.

use super::{Card, Interface, Mac};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// Broadcast address.
const BROADCAST: Mac = [0xff; 6];
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
/// Address of all nodes of a network: `ff02::1` (RFC 4291), and its Ethernet address (RFC 2464).
const ALL_NODES: (Ipv6Addr, Mac) = (Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), [0x33, 0x33, 0, 0, 0, 1]);
const ICMPV6: u8 = 58;
/// Least length of an Ethernet frame's payload.
const PAYLOAD_MIN: usize = 46;

/// A socket that sends and receives frames of one type.
#[derive(Debug)]
pub struct Packets {
    socket: OwnedFd,
    ether_type: u16,
}

impl Packets {
    /// Opens the socket, on all cards.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses.
    pub fn open(ether_type: u16) -> io::Result<Self> {
        let flags = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: makes a descriptor, which has no other owner.
        let fd = unsafe { libc::socket(libc::AF_PACKET, flags, i32::from(ether_type.to_be())) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { socket, ether_type })
    }

    /// Broadcasts a payload on a card's network.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be sent.
    pub fn say(&self, card: &Card, payload: &[u8]) -> io::Result<()> {
        self.say_to(BROADCAST, card.index, payload)
    }

    fn say_to(&self, mac: Mac, interface: i32, payload: &[u8]) -> io::Result<()> {
        let mut payload = payload.to_vec();
        payload.resize(payload.len().max(PAYLOAD_MIN), 0);
        // SAFETY: all zeros are a valid address.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as libc::sa_family_t;
        to.sll_protocol = self.ether_type.to_be();
        to.sll_ifindex = interface;
        to.sll_halen = mac.len() as u8;
        to.sll_addr[..mac.len()].copy_from_slice(&mac);
        // SAFETY: both the payload and the address live, and have the given lengths.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                payload.as_ptr().cast(),
                payload.len(),
                0,
                (&raw const to).cast(),
                size_of_val(&to) as libc::socklen_t,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Returns the payload of a received frame, if there is one.
    #[must_use]
    pub fn hear(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 2048];
        let read = rustix::io::read(&self.socket, &mut buffer[..]).ok()?;
        buffer.truncate(read);
        Some(buffer)
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Announces the card's addresses on its network (RFC 5227), so that neighbours and switches know
/// the new way at once.
///
/// # Errors
///
/// Returns an error if the announcements cannot be sent.
pub fn announce(card: &Card) -> io::Result<()> {
    let packets = Packets::open(ARP)?;
    card.addresses.iter().try_for_each(|(address, _)| packets.say(card, &announcement(card.mac, *address)))
}

/// Announces the addresses of all interfaces, of both kinds: by IPv6 as unsolicited advertisements
/// (RFC 4861, 7.2.6).
///
/// # Errors
///
/// Returns an error if they cannot be sent.
pub fn announce_all(interfaces: &[Interface]) -> io::Result<()> {
    let (arp, ipv6) = (Packets::open(ARP)?, Packets::open(IPV6)?);
    for Interface { index, mac, addresses } in interfaces {
        for address in addresses {
            match address {
                IpAddr::V4(address) => arp.say_to(BROADCAST, *index, &announcement(*mac, *address))?,
                IpAddr::V6(address) => {
                    ipv6.say_to(ALL_NODES.1, *index, &advertisement(*mac, *address))?;
                }
            }
        }
    }
    Ok(())
}

/// Makes the packet of a neighbour advertisement to all, which overrides their caches (RFC 4861,
/// 4.4).
fn advertisement(mac: Mac, address: Ipv6Addr) -> [u8; 40 + 32] {
    const LENGTH: u8 = 32;
    let mut bytes = [0; 72];
    bytes[0] = 6 << 4;
    bytes[5] = LENGTH;
    bytes[6] = ICMPV6;
    // Hop limit: the packet has not gone through a router.
    bytes[7] = 255;
    bytes[8..24].copy_from_slice(&address.octets());
    bytes[24..40].copy_from_slice(&ALL_NODES.0.octets());
    let icmp = &mut bytes[40..];
    // An advertisement; override.
    icmp[0] = 136;
    icmp[4] = 1 << 5;
    icmp[8..24].copy_from_slice(&address.octets());
    // The target's link-layer address, in units of eight bytes.
    icmp[24..26].copy_from_slice(&[2, 1]);
    icmp[26..].copy_from_slice(&mac);
    let sum = checksum(&bytes, LENGTH);
    bytes[42..44].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Computes the checksum of an ICMPv6 payload and of the pseudo-header (RFC 8200, 8.1).
fn checksum(packet: &[u8], length: u8) -> u16 {
    let (pairs, _) = packet[8..].as_chunks::<2>();
    let sum = pairs.iter().map(|pair| u32::from(u16::from_be_bytes(*pair))).sum::<u32>();
    let mut sum = sum + u32::from(length) + u32::from(ICMPV6);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // The sum is folded to 16 bits.
    !(sum as u16)
}

/// Makes an ARP request for the sender's own address.
fn announcement(mac: Mac, address: Ipv4Addr) -> [u8; 28] {
    let mut bytes = [0; 28];
    // Ethernet, IPv4, their lengths, a request.
    bytes[..8].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    bytes[8..14].copy_from_slice(&mac);
    bytes[14..18].copy_from_slice(&address.octets());
    bytes[24..].copy_from_slice(&address.octets());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertisements_say_who_one_is() {
        let address = "fd09::2".parse().expect("an address");
        let bytes = advertisement([1, 2, 3, 4, 5, 6], address);
        assert_eq!(bytes[..8], [0x60, 0, 0, 0, 0, 32, 58, 255]);
        assert_eq!((bytes[40], bytes[44], &bytes[66..]), (136, 0x20, &[1, 2, 3, 4, 5, 6][..]));
        assert_eq!(bytes[48..64], address.octets());
        // With the right checksum the whole sum is all ones.
        assert_eq!(checksum(&bytes, 32), 0);
        assert_ne!([bytes[42], bytes[43]], [0, 0]);
    }

    #[test]
    fn announcements_ask_for_oneself() {
        let bytes = announcement([1, 2, 3, 4, 5, 6], Ipv4Addr::new(10, 9, 0, 2));
        assert_eq!(bytes[8..18], [1, 2, 3, 4, 5, 6, 10, 9, 0, 2]);
        assert_eq!(bytes[18..], [0, 0, 0, 0, 0, 0, 10, 9, 0, 2]);
    }
}
