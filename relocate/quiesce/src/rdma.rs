//! Users of RDMA devices, as the kernel reports them by netlink (`rdma resource show` of iproute2
//! asks the same).
//!
//! Each RDMA device has a queue pair of the kernel's for management, used or not. Ordinary Ethernet
//! cards have an RDMA device as soon as their module is loaded. So these count: a process's
//! context, queue pair or memory region; and a queue pair of another kernel module (NFS over RDMA,
//! NVMe over RDMA).
//!
//! The constants and layouts are those of `include/uapi/rdma/rdma_netlink.h` and of netlink(7).

use super::openers::Process;
use mercury_control::sysroot::Sysroot;
use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read, Write},
    os::fd::FromRawFd,
};

const NETLINK_RDMA: i32 = 20;
/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 0)`.
const CLIENT: u16 = 5 << 10;
const GET_DEVICES: u16 = 1;
const GET_QUEUE_PAIRS: u16 = 10;
const GET_REGIONS: u16 = 13;
const GET_CONTEXTS: u16 = 22;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;

const DEVICE_INDEX: u16 = 1;
const DEVICE_NAME: u16 = 2;
const QUEUE_PAIRS: u16 = 19;
const TYPE: u16 = 26;
const PID: u16 = 28;
const KERNEL_NAME: u16 = 29;
const REGIONS: u16 = 40;
const CONTEXTS: u16 = 86;

/// `IB_QPT_GSI`: up to this type a queue pair is for management (or a driver's own, whose type is
/// cut off here).
const LAST_OF_MANAGEMENT: u8 = 1;

/// A user of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// The process of this number.
    Process(u32),
    /// A process that has ended, whose resources are not freed yet.
    Ended,
    /// A module of the kernel.
    Module(String),
}

impl User {
    #[must_use]
    pub fn named(&self, sysroot: &Sysroot) -> String {
        match self {
            Self::Process(pid) => super::openers::names([&Process::of(*pid, sysroot)]),
            Self::Ended => "a process that has ended".into(),
            Self::Module(name) => format!("the kernel's module {name}"),
        }
    }
}

/// Returns the users of the RDMA device of this name.
///
/// # Errors
///
/// Returns an error if the kernel does not report them.
pub fn users(name: &str) -> io::Result<BTreeSet<User>> {
    let mut socket = Socket::open()?;
    let devices = socket.dump(GET_DEVICES, None)?;
    let index = devices.iter().find_map(|message| index_of(message, name)).ok_or(io::ErrorKind::NotFound)?;
    let mut found = BTreeSet::new();
    for (request, table) in [(GET_CONTEXTS, CONTEXTS), (GET_QUEUE_PAIRS, QUEUE_PAIRS), (GET_REGIONS, REGIONS)]
    {
        for message in socket.dump(request, Some(index))? {
            found.extend(users_in(&message, table));
        }
    }
    Ok(found)
}

struct Socket(File);

impl Socket {
    fn open() -> io::Result<Self> {
        // SAFETY: makes a descriptor, which has no other owner.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_RDMA) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Returns the attributes of each message of the answer.
    fn dump(&mut self, command: u16, device: Option<u32>) -> io::Result<Vec<Vec<u8>>> {
        self.0.write_all(&request(command, device))?;
        let mut found = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let length = self.0.read(&mut buffer)?;
            if take_messages(&buffer[..length], &mut found)? {
                return Ok(found);
            }
        }
    }
}

fn request(command: u16, device: Option<u32>) -> Vec<u8> {
    let attribute = device.map(|index| {
        let mut bytes = 8_u16.to_ne_bytes().to_vec();
        bytes.extend(DEVICE_INDEX.to_ne_bytes());
        bytes.extend(index.to_ne_bytes());
        bytes
    });
    let attribute = attribute.unwrap_or_default();
    let mut bytes = (16 + attribute.len() as u32).to_ne_bytes().to_vec();
    bytes.extend((CLIENT | command).to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    // The request's number, and the sender's, which the kernel fills in.
    bytes.extend([0; 8]);
    bytes.extend(attribute);
    bytes
}

/// Collects the contents of messages; returns true after the last one.
fn take_messages(mut bytes: &[u8], found: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    while !bytes.is_empty() {
        let length = number(bytes, 0).ok_or_else(malformed)? as usize;
        let kind = bytes.get(4..6).and_then(|two| two.try_into().ok()).map(u16::from_ne_bytes);
        let content = bytes.get(16..length).ok_or_else(malformed)?;
        match kind {
            Some(NLMSG_DONE) => return error_of(content).map(|()| true),
            Some(NLMSG_ERROR) => return error_of(content).map(|()| true),
            _ => found.push(content.to_vec()),
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn error_of(content: &[u8]) -> io::Result<()> {
    match number(content, 0).map(u32::cast_signed) {
        Some(error) if error < 0 => Err(io::Error::from_raw_os_error(-error)),
        _ => Ok(()),
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Iterates over the attributes of a message, or of another attribute: type and value.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    /// Mask that removes flags from the type.
    const TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let word = |at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
        let (length, kind) = (usize::from(word(0)?), word(2)? & TYPE_MASK);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn text(value: &[u8]) -> String {
    mercury_control::status::nul_padded(value)
}

/// Returns the index of the device of this name, if the message is about that device.
fn index_of(message: &[u8], name: &str) -> Option<u32> {
    let is_it = attributes(message).any(|(kind, value)| kind == DEVICE_NAME && text(value) == name);
    let index = attributes(message).find(|(kind, _)| *kind == DEVICE_INDEX);
    index.filter(|_| is_it).and_then(|(_, value)| number(value, 0))
}

/// Returns the users of the resources in one of a message's tables.
fn users_in(message: &[u8], table: u16) -> Vec<User> {
    let tables = attributes(message).filter(|(kind, _)| *kind == table);
    // The type of an entry is that of its table plus one.
    tables
        .flat_map(|(_, entries)| attributes(entries))
        .filter(|(kind, _)| *kind == table + 1)
        .filter_map(|(_, entry)| user_of(entry, table))
        .collect()
}

/// Returns the user of a resource; `None` if it is the kernel's own for management.
fn user_of(entry: &[u8], table: u16) -> Option<User> {
    let find = |wanted: u16| attributes(entry).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    if let Some(name) = find(KERNEL_NAME) {
        let management =
            find(TYPE).is_none_or(|kind| kind.first().is_none_or(|kind| *kind <= LAST_OF_MANAGEMENT));
        // The kernel's memory regions do nothing without a queue pair.
        return (table == QUEUE_PAIRS && !management).then(|| User::Module(text(name)));
    }
    Some(find(PID).and_then(|value| number(value, 0)).map_or(User::Ended, User::Process))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(kind: u16, content: &[u8]) -> Vec<u8> {
        let mut bytes = (16 + content.len() as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(content);
        bytes
    }

    fn entry(table: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
        attribute(table | 0x8000, &attribute(table + 1, &attributes.concat()))
    }

    fn of_process(pid: u32) -> Vec<u8> {
        attribute(PID, &pid.to_ne_bytes())
    }

    #[test]
    fn management_is_no_use() {
        let management = entry(QUEUE_PAIRS, &[attribute(TYPE, &[1]), attribute(KERNEL_NAME, b"ib_core\0")]);
        let region = entry(REGIONS, &[attribute(KERNEL_NAME, b"rpcrdma\0")]);
        assert_eq!(users_in(&management, QUEUE_PAIRS), []);
        assert_eq!(users_in(&region, REGIONS), []);
        let storage = entry(QUEUE_PAIRS, &[attribute(TYPE, &[2]), attribute(KERNEL_NAME, b"nvme_rdma\0")]);
        assert_eq!(users_in(&storage, QUEUE_PAIRS), [User::Module("nvme_rdma".into())]);
    }

    #[test]
    fn processes_are_users() {
        for table in [CONTEXTS, QUEUE_PAIRS, REGIONS] {
            let both = [entry(table, &[attribute(TYPE, &[2]), of_process(77)]), entry(table, &[])].concat();
            assert_eq!(users_in(&both, table), [User::Process(77), User::Ended]);
            assert_eq!(users_in(&both, table + 2), []);
        }
    }

    #[test]
    fn an_answer_has_many_messages_and_an_end() {
        let device = |index: u32, name: &[u8]| {
            [attribute(DEVICE_INDEX, &index.to_ne_bytes()), attribute(DEVICE_NAME, name)].concat()
        };
        let both = [
            message(CLIENT | GET_DEVICES, &device(0, b"rxe0\0")),
            message(CLIENT | GET_DEVICES, &device(7, b"mlx5_0\0")),
        ];
        let mut found = Vec::new();
        assert!(!take_messages(&both.concat(), &mut found).expect("messages"));
        assert!(take_messages(&message(NLMSG_DONE, &[0; 4]), &mut found).expect("the end"));
        assert_eq!(found.iter().find_map(|message| index_of(message, "mlx5_0")), Some(7));
        assert_eq!(found.iter().find_map(|message| index_of(message, "mlx5")), None);
        let failed = message(NLMSG_ERROR, &(-libc::EPERM).to_ne_bytes());
        let error = take_messages(&failed, &mut found).expect_err("an error");
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert_eq!(request(GET_REGIONS, Some(7)).len(), 24);
        assert_eq!(request(GET_DEVICES, None).len(), 16);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut found = Vec::new();
            let _ = take_messages(&bytes, &mut found);
            let _ = (users_in(&bytes, QUEUE_PAIRS), index_of(&bytes, "x"));
        }
    }
}
