//! Users of RDMA devices, as the kernel reports them by netlink (`rdma resource show` of iproute2
//! asks the same).
//!
//! Each RDMA device has a queue pair of the kernel's for management, used or not. Ordinary Ethernet
//! cards have an RDMA device as soon as their module is loaded. So these count: a process's
//! context, queue pair or memory region; and a queue pair of another kernel module (NFS over RDMA,
//! NVMe over RDMA).
//!
//! The constants and layouts are those of `include/uapi/rdma/rdma_netlink.h` and of netlink(7).

use super::{
    netlink::{Socket, attributes, number, text},
    openers::Process,
};
use mercury_control::sysroot::Sysroot;
use std::{collections::BTreeSet, io};

const NETLINK_RDMA: i32 = 20;
/// `RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, 0)`.
const CLIENT: u16 = 5 << 10;
const GET_DEVICES: u16 = 1;
const GET_QUEUE_PAIRS: u16 = 10;
const GET_REGIONS: u16 = 13;
const GET_CONTEXTS: u16 = 22;

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
    let mut socket = Socket::open(NETLINK_RDMA)?;
    let devices = socket.dump(CLIENT | GET_DEVICES, &[])?;
    let index = devices.iter().find_map(|message| index_of(message, name)).ok_or(io::ErrorKind::NotFound)?;
    let mut found = BTreeSet::new();
    for (request, table) in [(GET_CONTEXTS, CONTEXTS), (GET_QUEUE_PAIRS, QUEUE_PAIRS), (GET_REGIONS, REGIONS)]
    {
        for message in socket.dump(CLIENT | request, &of_device(index))? {
            found.extend(users_in(&message, table));
        }
    }
    Ok(found)
}

/// Makes the content of a request about one device.
fn of_device(index: u32) -> Vec<u8> {
    let mut bytes = 8_u16.to_ne_bytes().to_vec();
    bytes.extend(DEVICE_INDEX.to_ne_bytes());
    bytes.extend(index.to_ne_bytes());
    bytes
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
    use super::{
        super::netlink::{NLMSG_DONE, NLMSG_ERROR, request, take_messages, tests::attribute},
        *,
    };
    use proptest::prelude::*;

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
        assert_eq!(request(GET_REGIONS, &of_device(7)).len(), 24);
        assert_eq!(request(GET_DEVICES, &[]).len(), 16);
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
