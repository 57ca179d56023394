//! Joining a subnet, and asking who is there.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use mercury_hosted_options::net::SubnetName;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType, connect, recv, recvmsg, send, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};

use crate::{
    Address, MOST,
    error::Result,
    keeper::HANDED,
    message::{ANSWER, Answer, Request},
    place::{Folder, lock_within, try_lock},
    port::Membership,
};
pub use crate::{error::Error, message::Member};

/// The time that a keeper has for an answer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

/// The time in which a machine has joined, and started the keeper if there is none.
const LOCK_PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// Joins a subnet. If it has no keeper, `start` starts one, and returns when the keeper can be reached.
///
/// # Errors
/// If the subnet is full, its keeper was killed, or the host refuses a part of it.
pub fn join(
    folder: &Folder,
    name: &SubnetName,
    wanted: Option<Address>,
    start: impl FnOnce() -> io::Result<()>,
) -> Result<Membership> {
    folder.make()?;
    let starting = folder.start_lock(name)?;
    let locked = lock_within(&starting, LOCK_PATIENCE).map_err(|error| {
        Error::new(format!("cannot lock a file of the subnet {name}: {error}"))
            .hint("the folder of subnets has to be on a file system with locks: set XDG_RUNTIME_DIR to one")
    })?;
    if !locked {
        let seconds = LOCK_PATIENCE.as_secs();
        let text = format!("another machine that joins subnet {name} has held its lock for {seconds} s");
        return Err(Error::new(text).hint(format!(
            "a process of mercury-hosted that has {name}.start open may be stopped: end it, or let it go on"
        )));
    }
    let members = folder.members_lock(name)?;
    let path = folder.socket(name);
    let connection = match reach(&path)? {
        Some(connection) => connection,
        None => {
            if !try_lock(&members, FlockOperation::NonBlockingLockExclusive)? {
                let text = format!("the keeper of subnet {name} was ended while machines are on it");
                return Err(Error::new(text).hint("end these machines, or choose another name"));
            }
            start().map_err(|error| {
                Error::new(format!("cannot start the keeper of subnet {name}: {error}"))
                    .hint("the host limits your processes or memory: raise ulimit -u, or end a machine")
            })?;
            let gone = || {
                Error::new(format!("the keeper of subnet {name} has ended at once"))
                    .hint("its reason is written above: mend that, and start the machine again")
            };
            reach(&path)?.ok_or_else(gone)?
        }
    };
    flock(&members, FlockOperation::LockShared).map_err(Error::call("lock a file of the subnet"))?;
    let membership = ask_to_join(connection, name, wanted)?;
    Ok(Membership { lock: Some(members), ..membership })
}

/// Returns the machines of a subnet. `None` if there is no such subnet.
///
/// # Errors
/// If its keeper does not answer.
pub fn list(folder: &Folder, name: &SubnetName) -> Result<Option<Vec<Member>>> {
    let Some(connection) = reach(&folder.socket(name))? else { return Ok(None) };
    let wrong = Error::call("ask the keeper of the subnet");
    send(&connection, &Request::List.to_bytes(), SendFlags::NOSIGNAL).map_err(wrong)?;
    let mut bytes = [0; ANSWER];
    let wrong = Error::call("hear from the keeper of the subnet");
    let (length, _) = recv(&connection, &mut bytes, RecvFlags::empty()).map_err(wrong)?;
    match Answer::from_bytes(&bytes[..length.min(ANSWER)]) {
        Some(Answer::List(members)) => Ok(Some(members)),
        // It ends at this moment.
        None if length == 0 => Ok(None),
        _ => Err(strange(name)),
    }
}

fn strange(name: &SubnetName) -> Error {
    Error::new(format!("the keeper of subnet {name} is of another version"))
        .hint("end the machines on it, which other versions of mercury have started")
}

/// Connects to a keeper. `None` if there is none.
fn reach(path: &Path) -> Result<Option<OwnedFd>> {
    let wrong = |error: Errno| Error::file("connect to", path, error);
    let connection =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(wrong)?;
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&connection, which, Some(PATIENCE)).map_err(wrong)?;
    }
    let address = SocketAddrUnix::new(path).map_err(|error| wrong(error).hint("choose a shorter name"))?;
    match connect(&connection, &address) {
        Ok(()) => Ok(Some(connection)),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(error) => Err(wrong(error)),
    }
}

fn ask_to_join(connection: OwnedFd, name: &SubnetName, wanted: Option<Address>) -> Result<Membership> {
    let wrong = Error::call("ask the keeper of the subnet");
    let request = Request::Join { address: wanted };
    send(&connection, &request.to_bytes(), SendFlags::NOSIGNAL).map_err(wrong)?;
    let (answer, descriptors) =
        receive(&connection).map_err(Error::call("hear from the keeper of the subnet"))?;
    match answer {
        Some(Answer::Joined { slot, address }) => {
            let mut all = descriptors.into_iter();
            let mut next = || all.next().ok_or_else(|| strange(name));
            let (rings, directory, bell) = (next()?, next()?, next()?);
            let bells: Vec<OwnedFd> = all.collect();
            if bells.len() != MOST {
                return Err(strange(name));
            }
            Ok(Membership {
                slot: slot.into(),
                address,
                rings,
                directory,
                bell,
                bells,
                connection,
                lock: None,
            })
        }
        Some(Answer::Full) => {
            Err(Error::new(format!("subnet {name} has {MOST} machines, the most that it can have"))
                .hint("choose another name"))
        }
        Some(Answer::Taken) => Err(Error::new(format!("another machine of subnet {name} has this address"))
            .hint("choose another address with --mac")),
        _ => Err(strange(name)),
    }
}

/// Receives an answer with descriptors.
fn receive(connection: impl AsFd) -> rustix::io::Result<(Option<Answer>, Vec<OwnedFd>)> {
    let mut bytes = [0; ANSWER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(all) => Some(all),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    Ok((Answer::from_bytes(&bytes[..received.bytes.min(ANSWER)]), descriptors))
}
