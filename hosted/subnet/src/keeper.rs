//! The keeper of a subnet: a process that makes the rings, hands each machine its own, and sees machines
//! leave.
//!
//! The first machine starts it, and it ends after the last one has left. It takes no part in the traffic: if
//! it is killed, the machines go on, and only no other one can join.

use std::{
    fs::File,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use mercury_hosted_options::net::SubnetName;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FallocateFlags, FlockOperation, Mode, OFlags, fallocate},
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType, accept_with, bind, listen, recv, send, sendmsg, socket_with,
        sockopt::socket_peercred,
    },
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
};

use crate::{
    Address, MOST,
    error::{Error, Result},
    memory::{Access, Memory, make_file},
    message::{Answer, Member, REQUEST, Request},
    place::{Folder, try_lock},
    port::{RINGS, bit, directory, ring_bell, slots},
    ring::{self, Ring},
};

/// Descriptors that a machine gets: the rings, the directory, its bell, and all bells to ring.
pub(crate) const HANDED: usize = 3 + MOST;
/// Connections at a time, of machines and of those who ask for a list.
const CONNECTIONS: usize = MOST + 16;
/// The pages of a ring that stay when a machine leaves: its positions.
const KEPT: u64 = 4096;
/// While no machine is there, the keeper tries this often to end.
const TRY_TO_END: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Returns the address of the machine in a slot that has asked for none.
pub type Addresses<'a> = &'a dyn Fn(usize) -> Address;

/// The rings of a subnet, and who is there.
#[derive(Debug)]
struct Subnet {
    rings: File,
    /// The directory, as machines may open it.
    readable: OwnedFd,
    page: Memory,
    bells: Vec<(OwnedFd, OwnedFd)>,
    members: [Option<Member>; MOST],
    /// Slots that have ever had a machine: other rings have no pages.
    ever: u64,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// The slot of a machine that has joined.
    slot: Option<usize>,
}

/// A keeper that can be reached.
pub struct Keeper<'a> {
    subnet: Subnet,
    listener: OwnedFd,
    lock: File,
    connections: Vec<Connection>,
    addresses: Addresses<'a>,
    folder: &'a Folder,
    name: &'a SubnetName,
}

impl<'a> Keeper<'a> {
    /// Makes a subnet. The caller's parent holds the lock of its start.
    ///
    /// # Errors
    /// If the host refuses memory, pipes or the socket.
    pub fn start(folder: &'a Folder, name: &'a SubnetName, addresses: Addresses<'a>) -> Result<Self> {
        folder.make()?;
        let subnet = Subnet::new()?;
        let lock = folder.start_lock(name)?;
        let path = folder.socket(name);
        let wrong = |error: rustix::io::Errno| Error::file("make the socket", &path, error);
        // A killed keeper has left it.
        let _ = std::fs::remove_file(&path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(wrong)?;
        let address = SocketAddrUnix::new(&path).map_err(wrong)?;
        bind(&listener, &address).map_err(wrong)?;
        listen(&listener, 16).map_err(wrong)?;
        Ok(Self { subnet, listener, lock, connections: Vec::new(), addresses, folder, name })
    }

    /// Serves machines until none is there.
    ///
    /// # Errors
    /// If the host does not let it wait.
    pub fn serve(mut self) -> Result<()> {
        while self.subnet.is_used() || !self.ends()? {
            let ready = self.wait()?;
            for (at, is_ready) in ready.iter().enumerate().skip(1).rev() {
                if *is_ready && !self.answer(at - 1) {
                    self.end_connection(at - 1);
                }
            }
            if ready[0] {
                self.accept();
            }
        }
        Ok(())
    }

    /// Waits until the listener (the first) or a connection can be read.
    fn wait(&self) -> Result<Vec<bool>> {
        let sockets = self.connections.iter().map(|one| one.socket.as_fd());
        let all = std::iter::once(self.listener.as_fd()).chain(sockets);
        let mut polled: Vec<PollFd<'_>> =
            all.map(|one| PollFd::from_borrowed_fd(one, PollFlags::IN)).collect();
        let limit = (!self.subnet.is_used()).then_some(&TRY_TO_END);
        match poll(&mut polled, limit) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::call("wait for machines")(error)),
        }
        Ok(polled.iter().map(|one| !one.revents().is_empty()).collect())
    }

    /// Ends if no machine is about to join. The subnet's socket is gone then.
    fn ends(&mut self) -> Result<bool> {
        if !try_lock(&self.lock, FlockOperation::NonBlockingLockExclusive)? {
            return Ok(false);
        }
        let _ = std::fs::remove_file(self.folder.socket(self.name));
        Ok(true)
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(&self.listener, flags) else { return };
        let own = rustix::process::geteuid();
        let is_own = socket_peercred(&socket).is_ok_and(|peer| peer.uid == own);
        if is_own && self.connections.len() < CONNECTIONS {
            self.connections.push(Connection { socket, slot: None });
        }
    }

    /// Answers a connection. Returns false if it has ended.
    fn answer(&mut self, at: usize) -> bool {
        let connection = &mut self.connections[at];
        let mut bytes = [0; REQUEST + 1];
        let length = match recv(&connection.socket, &mut bytes, RecvFlags::empty()) {
            Ok((0, _)) => return false,
            Ok((length, _)) => length,
            Err(error) => return error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR,
        };
        match (Request::from_bytes(&bytes[..length.min(bytes.len())]), connection.slot) {
            (Some(Request::List), None) => {
                let list = Answer::List(self.subnet.members.iter().flatten().copied().collect());
                let _ = send(&connection.socket, &list.to_bytes(), SendFlags::NOSIGNAL);
                true
            }
            (Some(Request::Join { address }), None) => {
                let answer = self.subnet.join(&connection.socket, address, self.addresses);
                connection.slot = answer;
                answer.is_some()
            }
            _ => false,
        }
    }

    fn end_connection(&mut self, at: usize) {
        if let Some(slot) = self.connections.swap_remove(at).slot {
            self.subnet.leave(slot);
        }
    }
}

impl Subnet {
    fn new() -> Result<Self> {
        let call = || Error::call("make the rings of a subnet");
        let page = make_file("mercury-subnet-directory", directory::SIZE as u64).map_err(call())?;
        let readable = reopened(page.as_fd()).map_err(call())?;
        let bells = (0..MOST).map(|_| {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            fcntl_setpipe_size(&write, KEPT as usize)?;
            Ok((read, write))
        });
        Ok(Self {
            rings: make_file("mercury-subnet-rings", RINGS).map_err(call())?,
            readable,
            page: Memory::map(&page, 0, directory::SIZE, Access::Write).map_err(call())?,
            bells: bells.collect::<rustix::io::Result<_>>().map_err(call())?,
            members: [None; MOST],
            ever: 0,
        })
    }

    fn is_used(&self) -> bool {
        self.members.iter().any(Option::is_some)
    }

    /// Gives the machine of a connection a slot. Returns the slot if the machine has it.
    fn join(&mut self, socket: &OwnedFd, wanted: Option<Address>, addresses: Addresses<'_>) -> Option<usize> {
        let found = self.choose(wanted, addresses);
        let (slot, address) = match found {
            Ok(found) => found,
            Err(answer) => {
                let _ = send(socket, &answer.to_bytes(), SendFlags::NOSIGNAL);
                return None;
            }
        };
        let process =
            socket_peercred(socket).map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        self.members[slot] = Some(Member { slot: slot as u8, address, process });
        self.ever |= bit(slot);
        // The machine reads the directory when it has the answer.
        self.tell();
        if self.hand_over(socket, &Answer::Joined { slot: slot as u8, address }, slot).is_err() {
            self.leave(slot);
            return None;
        }
        Some(slot)
    }

    fn choose(
        &self,
        wanted: Option<Address>,
        addresses: Addresses<'_>,
    ) -> std::result::Result<(usize, Address), Answer> {
        let slot = self.members.iter().position(Option::is_none).ok_or(Answer::Full)?;
        let address = wanted.unwrap_or_else(|| addresses(slot));
        let is_taken = self.members.iter().flatten().any(|member| member.address == address);
        if is_taken { Err(Answer::Taken) } else { Ok((slot, address)) }
    }

    fn hand_over(&self, socket: &OwnedFd, answer: &Answer, slot: usize) -> rustix::io::Result<()> {
        let first = [self.rings.as_fd(), self.readable.as_fd(), self.bells[slot].0.as_fd()];
        let all: Vec<BorrowedFd<'_>> =
            first.into_iter().chain(self.bells.iter().map(|bell| bell.1.as_fd())).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&all));
        sendmsg(socket, &[IoSlice::new(&answer.to_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Frees a machine's slot, and the memory of its rings.
    fn leave(&mut self, slot: usize) {
        self.members[slot] = None;
        self.tell();
        let row = slot * MOST * ring::SIZE;
        let Ok(memory) = Memory::map(&self.rings, row as u64, MOST * ring::SIZE, Access::Write) else {
            return;
        };
        let memory = Arc::new(memory);
        for from in slots(self.ever) {
            if let Some(ring) = Ring::new(&memory, from * ring::SIZE) {
                ring.clear();
            }
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let at = (row + from * ring::SIZE) as u64 + KEPT;
            // The memory is given back later if the host does not do it now.
            let _ = fallocate(&self.rings, hole, at, ring::SIZE as u64 - KEPT);
        }
    }

    /// Tells all machines who is there.
    fn tell(&self) {
        let present = self.members.iter().flatten().fold(0, |set, member| set | bit(member.slot.into()));
        let number = |at: usize| self.page.number::<AtomicU64>(at);
        number(directory::PRESENT).store(present, Ordering::Release);
        number(directory::EPOCH).fetch_add(1, Ordering::Release);
        slots(present).for_each(|slot| ring_bell(&self.bells[slot].1));
    }
}

/// Opens a file in memory again, for reading only.
fn reopened(file: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_has_so_many_places_and_gives_the_first_free_one() {
        let mut subnet = Subnet::new().unwrap();
        let address = |slot: usize| [2, 0, 0, 0, 0, slot as u8];
        for slot in 0..MOST {
            assert_eq!(subnet.choose(None, &address), Ok((slot, address(slot))));
            subnet.members[slot] = Some(Member { slot: slot as u8, address: address(slot), process: 1 });
        }
        assert_eq!(subnet.choose(None, &address), Err(Answer::Full));
        subnet.members[7] = None;
        assert_eq!(subnet.choose(None, &address), Ok((7, address(7))));
        assert_eq!(subnet.choose(Some(address(8)), &address), Err(Answer::Taken));
    }

    #[test]
    fn the_directory_is_handed_out_for_reading_only() {
        let subnet = Subnet::new().unwrap();
        assert!(Memory::map(&subnet.readable, 0, directory::SIZE, Access::Write).is_err());
        assert!(Memory::map(&subnet.readable, 0, directory::SIZE, Access::Read).is_ok());
        assert!(rustix::fs::ftruncate(&subnet.rings, 0).is_err());
    }
}
