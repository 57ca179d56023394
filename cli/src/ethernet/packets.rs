//! Frames to all of an Ethernet: for what has to be heard where there is no address to send it to.

use super::{Card, Mac};
use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// To all.
const BROADCAST: Mac = [0xff; 6];
const ARP: u16 = 0x0806;
/// An Ethernet frame's payload is at least so long.
const PAYLOAD_MIN: usize = 46;

/// Hears and says frames of one type.
#[derive(Debug)]
pub struct Packets {
    socket: OwnedFd,
    ether_type: u16,
}

impl Packets {
    /// Opens it, on all cards.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn open(ether_type: u16) -> io::Result<Self> {
        let flags = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: makes a descriptor, which nobody else has.
        let fd = unsafe { libc::socket(libc::AF_PACKET, flags, i32::from(ether_type.to_be())) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just made, and is owned by this alone.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { socket, ether_type })
    }

    /// Says something to all on a card's network.
    ///
    /// # Errors
    /// If it cannot be sent.
    pub fn say(&self, card: &Card, payload: &[u8]) -> io::Result<()> {
        let mut payload = payload.to_vec();
        payload.resize(payload.len().max(PAYLOAD_MIN), 0);
        // SAFETY: all zeros are a valid address.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as libc::sa_family_t;
        to.sll_protocol = self.ether_type.to_be();
        to.sll_ifindex = card.index;
        to.sll_halen = BROADCAST.len() as u8;
        to.sll_addr[..BROADCAST.len()].copy_from_slice(&BROADCAST);
        // SAFETY: both the payload and the address live, and are as long as is said.
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

    /// What was said by somebody, if anything was.
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

/// Tells all on a card's network that its addresses are here (RFC 5227's announcements), so that neighbours and switches
/// know the way at once.
///
/// # Errors
/// If they cannot be sent.
pub fn announce(card: &Card) -> io::Result<()> {
    let packets = Packets::open(ARP)?;
    card.addresses.iter().try_for_each(|(address, _)| packets.say(card, &announcement(card.mac, *address)))
}

/// An ARP request for one's own address.
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
    fn announcements_ask_for_oneself() {
        let bytes = announcement([1, 2, 3, 4, 5, 6], Ipv4Addr::new(10, 9, 0, 2));
        assert_eq!(bytes[8..18], [1, 2, 3, 4, 5, 6, 10, 9, 0, 2]);
        assert_eq!(bytes[18..], [0, 0, 0, 0, 0, 0, 10, 9, 0, 2]);
    }
}
