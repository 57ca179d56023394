//! The peers that may still talk to a machine that stands still until it is powered off: the
//! servers of network storage that the image needs, and the other end of the image's connection.
//! After the instant the driver lets no other packet through. So the kernel acknowledges no data
//! that the machine, when it goes on later, has never received. The same holds for a network file
//! system's server: a connection that was used after the instant hangs for minutes in the restored
//! machine.

use super::{
    file_systems::{SERVER_NAMED, SERVER_UNNAMED},
    mounts, nfs, reachable,
};
use mercury_abi::ioctl::{FencePeer, MERCURY_FENCE_PEERS_MAX};
use mercury_control::sysroot::Sysroot;
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Time for ssh to connect.
const PATIENCE: Duration = Duration::from_secs(20);

/// A peer whose packets pass; without a port, on any port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer {
    address: IpAddr,
    port: u16,
}

impl Peer {
    fn all_of(address: IpAddr) -> Self {
        Self { address, port: 0 }
    }

    /// Returns true if a connection's other end is this peer.
    pub fn is(&self, end: SocketAddr) -> bool {
        self.address == end.ip().to_canonical() && (self.port == 0 || self.port == end.port())
    }
}

impl From<SocketAddr> for Peer {
    fn from(from: SocketAddr) -> Self {
        Self { address: from.ip().to_canonical(), port: from.port() }
    }
}

impl From<Peer> for FencePeer {
    fn from(peer: Peer) -> Self {
        let mut address = [0; 16];
        let version = match peer.address {
            IpAddr::V4(v4) => {
                address[..4].copy_from_slice(&v4.octets());
                4
            }
            IpAddr::V6(v6) => {
                address = v6.octets();
                6
            }
        };
        Self { address, version, port: peer.port.into() }
    }
}

/// Lists all peers: the servers of the file systems that `files` are on, those of disks, and the
/// peers of `processes`, which carry the image.
///
/// # Errors
///
/// Returns the reason as a clause if some are unknown.
pub fn peers(files: &[&Path], processes: &[u32], sysroot: &Sysroot) -> Result<Vec<Peer>, String> {
    let mut peers = BTreeSet::new();
    let mountinfo = sysroot.text("proc/self/mountinfo").unwrap_or_default();
    for file in files {
        let file = file.canonicalize().map_err(|error| format!("{}: {error}", file.display()))?;
        peers.extend(of_file_system(mounts::line_of(&mountinfo, &file).unwrap_or_default())?);
    }
    peers.extend(of_disks(sysroot)?);
    let end = Instant::now() + PATIENCE;
    for process in processes {
        let mut found = connections(*process, sysroot);
        while found.is_empty() && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
            found = connections(*process, sysroot);
        }
        if found.is_empty() {
            return Err(format!("process {process}, which carries the image, has no connection of its own"));
        }
        peers.extend(found);
    }
    if peers.len() > MERCURY_FENCE_PEERS_MAX as usize {
        return Err(format!("there are {} servers of network storage", peers.len()));
    }
    Ok(peers.into_iter().collect())
}

/// Returns true if files or disks of this machine come from a server, known or not, in any mount
/// namespace or in none.
#[must_use]
pub fn has_servers(sysroot: &Sysroot) -> bool {
    let is_served =
        |table: &mounts::Table| table.text.lines().any(|line| !matches!(of_file_system(line), Ok(None)));
    mounts::tables(sysroot).iter().any(is_served)
        || !nfs::volumes(sysroot).is_empty()
        || of_disks(sysroot).map_or(true, |peers| !peers.is_empty())
}

/// Returns the server of a file system, from its line of mountinfo; none for a local file system.
fn of_file_system(line: &str) -> Result<Option<Peer>, String> {
    let mut words = line.split_once(" - ").map_or("", |(_, rest)| rest).split(' ');
    let (Some(kind), Some(source), Some(options)) = (words.next(), words.next(), words.next()) else {
        return Ok(None);
    };
    let mut options = options.split(',');
    if SERVER_NAMED.contains(&kind) {
        let address = options.find_map(|option| option.strip_prefix("addr="));
        let address = address.and_then(|text| text.parse().ok());
        return address.map(Peer::all_of).map(Some).ok_or_else(|| format!("{source} has no known address"));
    }
    if SERVER_UNNAMED.contains(&kind) || (kind == "9p" && options.any(|option| option == "trans=tcp")) {
        return Err(format!("the servers of {source} ({kind}) are unknown"));
    }
    Ok(None)
}

fn of_disks(sysroot: &Sysroot) -> Result<Vec<Peer>, String> {
    let disks = sysroot.names("sys/block");
    let unnamed = disks.iter().find(|disk| {
        disk.starts_with("rbd")
            || disk.starts_with("drbd")
            || (disk.starts_with("nbd") && sysroot.exists(&format!("sys/block/{disk}/pid")))
    });
    if let Some(disk) = unnamed {
        return Err(format!("the servers of {disk} are unknown"));
    }
    let mut peers = Vec::new();
    for connection in sysroot.names("sys/class/iscsi_connection") {
        let value = |name| sysroot.text(&format!("sys/class/iscsi_connection/{connection}/{name}"));
        let address = value("address").and_then(|text| text.parse().ok());
        peers.push(Peer::all_of(address.ok_or_else(|| format!("the address of {connection} is unknown"))?));
    }
    for controller in sysroot.names("sys/class/nvme") {
        let value = |name| sysroot.text(&format!("sys/class/nvme/{controller}/{name}")).unwrap_or_default();
        if value("transport") != "tcp" {
            continue;
        }
        let address = reachable::target(&value("address"));
        peers.push(Peer::all_of(address.ok_or_else(|| format!("the address of {controller} is unknown"))?));
    }
    Ok(peers)
}

/// Lists the peers of a process by TCP. If there are none, those of its children, such as ssh's
/// ProxyCommand.
fn connections(process: u32, sysroot: &Sysroot) -> Vec<Peer> {
    let folder = format!("proc/{process}/fd");
    let links = sysroot.names(&folder).into_iter();
    let links = links.filter_map(|fd| std::fs::read_link(sysroot.path(&format!("{folder}/{fd}"))).ok());
    let inodes: BTreeSet<u64> = links
        .filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok())
        .collect();
    let table = |name| sysroot.text(&format!("proc/{process}/net/{name}")).unwrap_or_default();
    let found: Vec<_> = [table("tcp"), table("tcp6")]
        .iter()
        .flat_map(|table| table.lines().filter_map(established).collect::<Vec<_>>())
        .filter(|(_, _, inode)| inodes.contains(inode))
        .map(|(_, peer, _)| peer.into())
        .collect();
    if !found.is_empty() {
        return found;
    }
    let children = sysroot.text(&format!("proc/{process}/task/{process}/children")).unwrap_or_default();
    children
        .split(' ')
        .filter_map(|child| child.parse().ok())
        .flat_map(|child| connections(child, sysroot))
        .collect()
}

/// Parses an established connection from a line of /proc/net/tcp or tcp6: both ends, the own one
/// first, and its inode.
pub fn established(line: &str) -> Option<(SocketAddr, SocketAddr, u64)> {
    const ESTABLISHED: &str = "01";
    connection(line, &[ESTABLISHED])
}

/// Parses a connection that may still send data: it is established, or one of its ends has closed
/// it.
pub fn talking(line: &str) -> Option<(SocketAddr, SocketAddr, u64)> {
    /// `TCP_ESTABLISHED`, `TCP_SYN_SENT`, `TCP_FIN_WAIT1`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`,
    /// `TCP_CLOSING`.
    const TALKING: [&str; 6] = ["01", "02", "04", "08", "09", "0B"];
    connection(line, &TALKING)
}

fn connection(line: &str, states: &[&str]) -> Option<(SocketAddr, SocketAddr, u64)> {
    let words: Vec<_> = line.split_whitespace().collect();
    if !states.contains(words.get(3)?) {
        return None;
    }
    Some((end(words.get(1)?)?, end(words.get(2)?)?, words.get(9)?.parse().ok()?))
}

/// Parses address words in this machine's byte order, and a port.
fn end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let octets: Vec<u8> = (0..address.len() / 8)
        .map(|word| address.get(word * 8..word * 8 + 8).and_then(|text| u32::from_str_radix(text, 16).ok()))
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    let address = match octets.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(octets).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(octets).ok()?),
        _ => return None,
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn the_image_s_server_is_named_and_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().canonicalize().expect("a path");
        let sysroot = Sysroot::at(&at);
        let image = at.join("net/image");
        for path in ["net", "proc/self"] {
            fs::create_dir_all(at.join(path)).expect("made");
        }
        fs::write(&image, "").expect("written");
        let options = "rw,vers=4.2,clientaddr=10.0.0.9";
        let table = format!(
            "22 1 0:20 / / rw,relatime shared:1 - nfs4 10.0.0.1:/root {options},addr=10.0.0.1\n\
             30 22 0:30 / {} rw - nfs4 10.0.0.2:/images {options},addr=10.0.0.2\n",
            at.join("net").display()
        );
        fs::write(at.join("proc/self/mountinfo"), table).expect("written");
        let peer = |address: &str| Peer::all_of(address.parse().expect("an address"));
        assert_eq!(peers(&[&image], &[], &sysroot), Ok(vec![peer("10.0.0.2")]));
        assert_eq!(peers(&[], &[], &sysroot), Ok(vec![]), "a root on a network is fenced off as well");
        assert_eq!(peers(&[&at], &[], &sysroot), Ok(vec![peer("10.0.0.1")]));
        assert!(has_servers(&sysroot));
        let ceph = "30 22 0:30 / /x rw - ceph 1.2.3.4:/ rw,name=x";
        assert!(of_file_system(ceph).is_err());
        for (line, has) in [(ceph, true), ("22 1 0:20 / / rw - ext4 /dev/vda1 rw", false)] {
            fs::write(at.join("proc/self/mountinfo"), line).expect("written");
            assert_eq!(has_servers(&sysroot), has, "{line}");
        }
        fs::create_dir_all(at.join("proc/7/task/7/ns")).expect("made");
        symlink("mnt:[7]", at.join("proc/7/task/7/ns/mnt")).expect("linked");
        fs::write(at.join("proc/7/task/7/mountinfo"), ceph).expect("written");
        assert!(has_servers(&sysroot), "a container has it");
        fs::remove_dir_all(at.join("proc/7")).expect("gone");
        assert!(!has_servers(&sysroot));
        fs::create_dir_all(at.join("proc/self/net/nfsfs")).expect("made");
        fs::write(at.join("proc/self/net/nfsfs/volumes"), "NV\nv3 0a000001  801 0:45 0:0 no\n")
            .expect("written");
        assert!(has_servers(&sysroot), "it is mounted nowhere, and a process uses it");
        assert!(of_file_system("30 22 0:30 / /x rw - cifs //a/b rw").is_err());
    }

    #[test]
    fn servers_of_disks_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(folder.path());
        let put = |path: &str, text: &str| {
            let path = sysroot.path(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        };
        put("sys/block/nbd0/size", "0");
        put("sys/class/nvme/nvme0/transport", "pcie\n");
        assert_eq!(of_disks(&sysroot), Ok(vec![]));
        assert!(!has_servers(&sysroot));
        put("sys/class/nvme/nvme1/transport", "tcp\n");
        put("sys/class/nvme/nvme1/address", "traddr=fd00::1,trsvcid=4420,src_addr=fd00::2\n");
        put("sys/class/iscsi_connection/connection1:0/address", "10.0.0.3\n");
        let found: Vec<_> =
            of_disks(&sysroot).expect("named").iter().map(|peer| peer.address.to_string()).collect();
        assert_eq!(found, ["10.0.0.3", "fd00::1"]);
        assert!(has_servers(&sysroot));
        put("sys/block/nbd0/pid", "7");
        assert!(of_disks(&sysroot).is_err() && has_servers(&sysroot));
    }

    #[test]
    fn connections_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(folder.path());
        for process in [5, 6] {
            fs::create_dir_all(sysroot.path(&format!("proc/{process}/fd"))).expect("made");
            fs::create_dir_all(sysroot.path(&format!("proc/{process}/net"))).expect("made");
            let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when \
                retrnsmt   uid  timeout inode\n   0: 0200000A:C350 0100000A:0016 01 00000000:00000000 \
                02:000A 00000000  0  0 77 2 0\n   1: 0200000A:C351 0300000A:0050 01 00000000:00000000 \
                02:000A 00000000  0  0 78 2 0\n   2: 00000000:0016 00000000:0000 0A 00000000:00000000 \
                00:0000 00000000  0  0 79 1 0\n";
            fs::write(sysroot.path(&format!("proc/{process}/net/tcp")), table).expect("written");
        }
        fs::create_dir_all(sysroot.path("proc/5/task/5")).expect("made");
        fs::write(sysroot.path("proc/5/task/5/children"), "6 ").expect("written");
        symlink("socket:[77]", sysroot.path("proc/6/fd/3")).expect("linked");
        symlink("socket:[79]", sysroot.path("proc/6/fd/4")).expect("linked");
        let peer = Peer { address: "10.0.0.1".parse().expect("an address"), port: 22 };
        assert_eq!(connections(6, &sysroot), [peer]);
        assert_eq!(connections(5, &sysroot), [peer], "a child's");
        let mapped =
            "1: 0000000000000000FFFF00000200000A:C350 0000000000000000FFFF00000100000A:0016 01 0 0 0 0 0 77";
        assert_eq!(established(mapped).map(|(_, peer, _)| Peer::from(peer)), Some(peer));
    }
}
