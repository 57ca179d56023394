//! Connections that must not go on in a machine that has come back to an instant, because its first
//! life has used them since.
//!
//! The image itself went over some of them, such as that to the server of its file system. In a
//! machine that was rolled back, or whose first life ran on, all of them may have been used. The
//! machine has them as they were at the instant, and its peers have long gone on. Each end takes
//! the other's packets for old ones, and both wait for minutes. On an encrypted connection (TLS, in
//! the kernel or in a program; ssh) the counters would run a second time with the same key. So
//! these connections are ended first of all, by `SOCK_DESTROY` of sock_diag(7), and programs make
//! new ones.

use super::fence::{self, Peer};
use mercury_control::sysroot::Sysroot;
use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    os::{
        fd::{AsFd, FromRawFd},
        unix::fs::MetadataExt,
    },
    path::PathBuf,
    thread,
};

/// The connections that have to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connections {
    /// Connections with some peers, in this network namespace.
    WithPeers(Vec<Peer>),
    /// All connections, in all network namespaces, except those of the machine with itself: both of
    /// their ends come back.
    All,
}

/// Ends connections.
#[derive(Debug)]
pub struct Stale {
    netlink: File,
    connections: Connections,
}

impl Stale {
    /// Prepares everything, so that the kernel need not load a module when connections are ended:
    /// its modules may lie behind one of them.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel cannot end connections. A kernel that lacks only the module
    /// for TCP gives the same answer as for an unknown connection, and ends nothing later.
    pub fn prepare(connections: Connections) -> io::Result<Self> {
        // SAFETY: makes a descriptor, which has no other owner.
        let fd = unsafe {
            libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and has no other owner.
        let mut stale = Self { netlink: unsafe { File::from_raw_fd(fd) }, connections };
        // An address without a connection.
        let nobody = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        match stale.end_one(nobody, nobody) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(stale),
            Err(error) => Err(error),
            Ok(()) => Ok(stale),
        }
    }

    /// Ends the connections. With peers, no path is looked up: the root may be behind one of them.
    pub fn end(&mut self, sysroot: &Sysroot) {
        match self.connections.clone() {
            Connections::WithPeers(peers) => {
                let all = self.established().unwrap_or_default();
                let theirs = all.into_iter().filter(|(_, other)| peers.iter().any(|peer| peer.is(*other)));
                self.end_all(theirs.collect());
            }
            Connections::All => namespaces(sysroot).iter().for_each(|namespace| end_in(namespace, sysroot)),
        }
    }

    fn end_all(&mut self, connections: Vec<(SocketAddr, SocketAddr)>) {
        for (own, other) in connections {
            // A connection that has ended by itself is fine.
            let _ = self.end_one(own, other);
        }
    }

    /// Lists the established connections of this network namespace, the own end first.
    fn established(&mut self) -> io::Result<Vec<(SocketAddr, SocketAddr)>> {
        let mut found = Vec::new();
        for nobody in ["0.0.0.0:0", "[::]:0"].map(|text| text.parse::<SocketAddr>()).into_iter().flatten() {
            self.netlink.write_all(&request(Ask::List, nobody, nobody))?;
            while self.listed(&mut found)? {}
        }
        Ok(found)
    }

    /// Reads a part of a list. Returns false at its end.
    fn listed(&mut self, found: &mut Vec<(SocketAddr, SocketAddr)>) -> io::Result<bool> {
        const NLMSG_ERROR: u16 = 2;
        const NLMSG_DONE: u16 = 3;
        let mut bytes = vec![0; 32 << 10];
        let length = self.netlink.read(&mut bytes)?;
        for (kind, payload) in messages(&bytes[..length]) {
            if matches!(kind, NLMSG_ERROR | NLMSG_DONE) {
                return Ok(false);
            }
            found.extend(ends(payload));
        }
        Ok(length != 0)
    }

    fn end_one(&mut self, own: SocketAddr, other: SocketAddr) -> io::Result<()> {
        self.netlink.write_all(&request(Ask::End, own, other))?;
        let mut answer = [0; 256];
        let length = self.netlink.read(&mut answer)?;
        // The word after the message's header: 0, or the negative number of an error.
        let error = answer[..length].get(16..20).and_then(|bytes| bytes.try_into().ok());
        match error.map(i32::from_ne_bytes) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Lists the connections of the calling thread's network namespace that `parse` recognizes, the own
/// end first.
fn connections(
    sysroot: &Sysroot,
    parse: impl Fn(&str) -> Option<(SocketAddr, SocketAddr, u64)>,
) -> Vec<(SocketAddr, SocketAddr)> {
    let table = |name| sysroot.text(&format!("proc/thread-self/net/{name}")).unwrap_or_default();
    let tables = [table("tcp"), table("tcp6")];
    let lines = tables.iter().flat_map(|table| table.lines());
    lines.filter_map(parse).map(|(own, other, _)| (own, other)).collect()
}

/// Leaves out connections whose other end is in the same list.
fn with_others(all: Vec<(SocketAddr, SocketAddr)>) -> Vec<(SocketAddr, SocketAddr)> {
    let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
    let ends: BTreeSet<_> = all.iter().map(|(own, other)| (canonical(*own), canonical(*other))).collect();
    let is_own =
        |(own, other): &(SocketAddr, SocketAddr)| ends.contains(&(canonical(*other), canonical(*own)));
    all.into_iter().filter(|pair| !is_own(pair)).collect()
}

/// Ends all connections of a network namespace that lead out of it.
fn end_in(namespace: &File, sysroot: &Sysroot) {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    thread::scope(|scope| {
        // A thread of its own enters the namespace, and the others stay in theirs.
        scope.spawn(|| {
            if move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).is_err() {
                return;
            }
            if let Ok(mut here) = Stale::prepare(Connections::All) {
                here.end_all(with_others(connections(sysroot, fence::talking)));
            }
        });
    });
}

/// Opens the network namespaces that a thread is in or that are mounted (`ip netns`), each once.
pub(super) fn namespaces(sysroot: &Sysroot) -> Vec<File> {
    let is_number = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = sysroot.names("proc").into_iter().filter(is_number);
    let of_tasks = processes.flat_map(|process| {
        let tasks = sysroot.names(&format!("proc/{process}/task"));
        tasks.into_iter().map(move |task| sysroot.path(&format!("proc/{process}/task/{task}/ns/net")))
    });
    let mountinfo = sysroot.text("proc/self/mountinfo").unwrap_or_default();
    let mounted: Vec<PathBuf> = mountinfo.lines().filter_map(mounted_namespace).collect();
    let mut seen = BTreeSet::new();
    let open = |path: PathBuf| {
        let file = File::open(path).ok()?;
        let inode = file.metadata().ok()?.ino();
        seen.insert(inode).then_some(file)
    };
    of_tasks.chain(mounted).filter_map(open).collect()
}

/// Returns the mount point of a network namespace, from a line of mountinfo.
fn mounted_namespace(line: &str) -> Option<PathBuf> {
    let (front, back) = line.split_once(" - ")?;
    let mut words = front.split(' ').skip(3);
    let (root, at) = (words.next()?, words.next()?);
    (back.starts_with("nsfs ") && root.starts_with("net:[")).then(|| at.into())
}

/// Splits what the kernel has sent: kinds and payloads.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const HEADER: usize = 16;
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
        let message = (u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?), bytes.get(HEADER..length)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// Returns both ends of a connection, from `struct inet_diag_msg`.
fn ends(payload: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let is_v4 = i32::from(*payload.first()?) == libc::AF_INET;
    let end = |port: usize, address: usize| {
        let port = u16::from_be_bytes(payload.get(port..port + 2)?.try_into().ok()?);
        let bytes: [u8; 16] = payload.get(address..address + 16)?.try_into().ok()?;
        let v4 = Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]);
        Some(SocketAddr::new(if is_v4 { v4.into() } else { IpAddr::from(bytes) }, port))
    };
    Some((end(4, 8)?, end(6, 24)?))
}

/// The sense of a request.
#[derive(Clone, Copy)]
enum Ask {
    /// Ends a connection.
    End,
    /// Lists the established connections.
    List,
}

/// Encodes `struct nlmsghdr` of netlink(7), and `struct inet_diag_req_v2` of sock_diag(7).
fn request(ask: Ask, own: SocketAddr, other: SocketAddr) -> Vec<u8> {
    const LENGTH: u32 = 72;
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const SOCK_DESTROY: u16 = 21;
    const NLM_F_REQUEST: u16 = 1;
    const NLM_F_ACK: u16 = 4;
    const NLM_F_DUMP: u16 = 0x300;
    /// `1 << TCP_ESTABLISHED`.
    const ESTABLISHED: u32 = 1 << 1;
    let (kind, flags, states) = match ask {
        // In any state.
        Ask::End => (SOCK_DESTROY, NLM_F_ACK, u32::MAX),
        Ask::List => (SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, ESTABLISHED),
    };
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
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // A number, and the sender's.
    bytes.extend([0; 8]);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(states.to_ne_bytes());
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

    /// Prepares to end connections with these peers; `None` if this test may not.
    fn stale(peers: Vec<Peer>) -> Option<Stale> {
        match Stale::prepare(Connections::WithPeers(peers)) {
            Ok(stale) => Some(stale),
            // Only root may end them, and not every kernel can.
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
            assert_eq!(request(Ask::End, own, other).len(), 72);
        }
        assert_eq!(request(Ask::End, own, own)[24..28], [3, 33, 3, 33]);
    }

    /// The kernel lists the same connections as in its files.
    #[test]
    fn connections_are_listed_without_a_path() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let there = listener.local_addr().expect("an address");
        let stream = TcpStream::connect(there).expect("a connection");
        let here = stream.local_addr().expect("an address");
        let Some(mut stale) = stale(Vec::new()) else { return };
        let listed = stale.established().expect("a list");
        assert!(listed.contains(&(here, there)), "{listed:?}");
        let by_file = connections(&Sysroot::default(), fence::established);
        assert!(by_file.contains(&(here, there)));
    }

    #[test]
    fn torn_answers_are_no_connections() {
        let mut answer = 88_u32.to_ne_bytes().to_vec();
        answer.resize(88, 0);
        answer[16] = libc::AF_INET as u8;
        assert_eq!(messages(&answer).filter_map(|(_, payload)| ends(payload)).count(), 1);
        for cut in 0..answer.len() {
            assert_eq!(messages(&answer[..cut]).filter_map(|(_, payload)| ends(payload)).count(), 0);
        }
    }

    #[test]
    fn connections_of_a_machine_with_itself_go_on() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let [own, far] = ["10.0.0.1:80", "10.0.0.2:9000"].map(address);
        let [client, mapped] = ["10.0.0.1:9000", "[::ffff:10.0.0.1]:80"].map(address);
        assert_eq!(with_others(vec![(own, far), (mapped, client), (client, own)]), [(own, far)]);
    }

    #[test]
    fn namespaces_are_found_where_they_are_mounted() {
        let line = |rest: &str| mounted_namespace(&format!("40 22 0:4 {rest}"));
        assert_eq!(line("net:[4026532] /run/netns/blue rw - nsfs nsfs rw"), Some("/run/netns/blue".into()));
        assert_eq!(line("mnt:[4026533] /run/x rw - nsfs nsfs rw"), None);
        assert_eq!(line("/net:[1] /run/y rw - tmpfs none rw"), None);
        let here = namespaces(&Sysroot::default());
        let inodes: BTreeSet<_> = here.iter().map(|file| file.metadata().expect("metadata").ino()).collect();
        let own = std::fs::metadata("/proc/self/ns/net").expect("a namespace").ino();
        assert!(inodes.contains(&own) && inodes.len() == here.len());
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
