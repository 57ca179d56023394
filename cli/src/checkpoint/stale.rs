//! Connections that went on behind the instant, over which the image went: to the server of the file system that it lies
//! on, for one. The machine that is brought back has them as they were at the instant, and its server has long
//! gone on. Each end takes what the other says for old, and both wait for minutes; so these are ended first of all, by
//! `SOCK_DESTROY` of sock_diag(7), and whoever needs one makes a new one.

use super::fence::{self, Peer};
use crate::sysroot::Sysroot;
use std::{
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    os::fd::FromRawFd,
};

/// Ends connections with some peers.
#[derive(Debug)]
pub struct Stale {
    netlink: File,
    peers: Vec<Peer>,
}

impl Stale {
    /// Makes everything ready, so that the kernel need not load anything when connections are to be ended; for its modules
    /// may lie behind one of them.
    ///
    /// # Errors
    /// If the kernel cannot do it; but one that lacks only the module for TCP says the same as of a connection that nobody has,
    /// and ends nothing later.
    pub fn prepare(peers: Vec<Peer>) -> io::Result<Self> {
        // SAFETY: makes a descriptor, which nobody else has.
        let fd = unsafe {
            libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just made, and is owned by this alone.
        let mut stale = Self { netlink: unsafe { File::from_raw_fd(fd) }, peers };
        // A connection that nobody has.
        let nobody = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        match stale.end_one(nobody, nobody) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(stale),
            Err(error) => Err(error),
            Ok(()) => Ok(stale),
        }
    }

    /// Ends them.
    pub fn end(&mut self, sysroot: &Sysroot) {
        let table = |name| sysroot.text(&format!("proc/self/net/{name}")).unwrap_or_default();
        for line in [table("tcp"), table("tcp6")].iter().flat_map(|table| table.lines()) {
            let Some((own, other, _)) = fence::established(line) else { continue };
            if self.peers.iter().any(|peer| peer.is(other)) {
                // One that has ended by itself is as good.
                let _ = self.end_one(own, other);
            }
        }
    }

    fn end_one(&mut self, own: SocketAddr, other: SocketAddr) -> io::Result<()> {
        self.netlink.write_all(&request(own, other))?;
        let mut answer = [0; 256];
        let length = self.netlink.read(&mut answer)?;
        // Behind the header of the message: 0, or the negative number of an error.
        let error = answer[..length].get(16..20).and_then(|bytes| bytes.try_into().ok());
        match error.map(i32::from_ne_bytes) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// `struct nlmsghdr` of netlink(7), and `struct inet_diag_req_v2` of sock_diag(7).
fn request(own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    const LENGTH: u32 = 72;
    const SOCK_DESTROY: u16 = 21;
    const NLM_F_REQUEST: u16 = 1;
    const NLM_F_ACK: u16 = 4;
    let address = |of: SocketAddr| -> [u8; 16] {
        match of.ip() {
            IpAddr::V4(v4) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&v4.octets());
                bytes
            }
            IpAddr::V6(v6) => v6.octets(),
        }
    };
    let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = Vec::with_capacity(LENGTH as usize);
    bytes.extend(LENGTH.to_ne_bytes());
    bytes.extend(SOCK_DESTROY.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    // A number, and who asks.
    bytes.extend([0; 8]);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // In any state.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(other.port().to_be_bytes());
    bytes.extend(address(own));
    bytes.extend(address(other));
    // By any card; no cookie.
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([0xFF; 8]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// Whether this test may end connections.
    fn stale(peers: Vec<Peer>) -> Option<Stale> {
        match Stale::prepare(peers) {
            Ok(stale) => Some(stale),
            // Only root may, and not every kernel can.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => {
                eprintln!("not tried: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_request_is_as_long_as_it_says() {
        let own = "10.9.0.2:801".parse().expect("an address");
        let other = "[fd00::1]:2049".parse().expect("an address");
        for (own, other) in [(own, own), (other, other)] {
            assert_eq!(request(own, other).len(), 72);
        }
        assert_eq!(request(own, own)[24..28], [3, 33, 3, 33]);
    }

    #[test]
    fn connections_with_peers_end_and_others_go_on() {
        let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
        let address = |listener: &TcpListener| listener.local_addr().expect("an address");
        let connect = |listener| {
            let stream = TcpStream::connect(address(listener)).expect("a connection");
            (stream, listener.accept().expect("its other end").0)
        };
        let [first, second] = [connect(&listeners[0]), connect(&listeners[1])];
        let Some(mut stale) = stale(vec![address(&listeners[0]).into()]) else { return };
        stale.end(&Sysroot::default());
        let says = |(mut from, mut to): (TcpStream, TcpStream)| {
            from.write_all(b"x")?;
            to.read_exact(&mut [0])
        };
        assert!(says(first).is_err());
        assert!(says(second).is_ok());
    }
}
