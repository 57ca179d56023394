//! Messages between a machine and the keeper of its subnet. Each is one packet of a socket that keeps packets
//! apart (`SOCK_SEQPACKET`).
//!
//! | from | request |
//! |---|---|
//! | 0 | [`MAGIC`] |
//! | 8 | the kind: 1 to join, 2 to list |
//! | 9 | 1 if an address follows |
//! | 10 | the address that the machine wants |
//!
//! | from | answer |
//! |---|---|
//! | 0 | [`MAGIC`] |
//! | 8 | the kind: 1 has joined, 2 a list, 3 the subnet is full, 4 another machine has the address |
//! | 9 | the slot; in a list the number of machines |
//! | 10 | the address; in a list, for each machine: its slot (1 byte), address (6), process (4) |

use crate::{Address, MOST};

/// The first bytes of each message. The last one is the version.
const MAGIC: [u8; 8] = *b"MERCSUB\x01";
/// Bytes of a request.
pub const REQUEST: usize = 16;
/// Bytes of a machine in a list.
const ENTRY: usize = 11;
/// Bytes of the longest answer.
pub const ANSWER: usize = 10 + MOST * ENTRY;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Join { address: Option<Address> },
    List,
}

impl Request {
    #[must_use]
    pub fn to_bytes(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&MAGIC);
        match self {
            Self::List => bytes[8] = 2,
            Self::Join { address } => {
                bytes[8] = 1;
                bytes[9] = address.is_some().into();
                bytes[10..].copy_from_slice(&address.unwrap_or_default());
            }
        }
        bytes
    }

    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (magic, [kind, has_address, address @ ..]) = bytes.split_first_chunk()? else { return None };
        let address: Address = address.try_into().ok()?;
        match (magic == &MAGIC, kind, has_address) {
            (true, 1, 0) => Some(Self::Join { address: None }),
            (true, 1, 1) => Some(Self::Join { address: Some(address) }),
            (true, 2, _) => Some(Self::List),
            _ => None,
        }
    }
}

/// A machine of a subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub slot: u8,
    pub address: Address,
    /// The process that has joined.
    pub process: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Joined { slot: u8, address: Address },
    List(Vec<Member>),
    Full,
    Taken,
}

impl Answer {
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        match self {
            Self::Joined { slot, address } => {
                bytes.extend([1, *slot]);
                bytes.extend(address);
            }
            Self::List(members) => {
                bytes.extend([2, members.len() as u8]);
                for member in members {
                    bytes.push(member.slot);
                    bytes.extend(member.address);
                    bytes.extend(member.process.to_le_bytes());
                }
            }
            Self::Full => bytes.extend([3, 0]),
            Self::Taken => bytes.extend([4, 0]),
        }
        bytes
    }

    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (magic, [kind, number, rest @ ..]) = bytes.split_first_chunk()? else { return None };
        if magic != &MAGIC {
            return None;
        }
        match kind {
            1 if usize::from(*number) < MOST => {
                Some(Self::Joined { slot: *number, address: rest.try_into().ok()? })
            }
            2 if rest.len() == usize::from(*number) * ENTRY => {
                Some(Self::List(rest.chunks_exact(ENTRY).filter_map(member).collect()))
            }
            3 => Some(Self::Full),
            4 => Some(Self::Taken),
            _ => None,
        }
    }
}

fn member(bytes: &[u8]) -> Option<Member> {
    let (&slot, rest) = bytes.split_first()?;
    let (address, process) = rest.split_first_chunk()?;
    Some(Member { slot, address: *address, process: u32::from_le_bytes(process.try_into().ok()?) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let address = [2, 3, 4, 5, 6, 7];
        for request in
            [Request::List, Request::Join { address: None }, Request::Join { address: Some(address) }]
        {
            assert_eq!(Request::from_bytes(&request.to_bytes()), Some(request));
        }
        let member = Member { slot: 3, address, process: 70_000 };
        for answer in [
            Answer::Joined { slot: 63, address },
            Answer::List(vec![member; MOST]),
            Answer::List(Vec::new()),
            Answer::Full,
            Answer::Taken,
        ] {
            let bytes = answer.to_bytes();
            assert!(bytes.len() <= ANSWER);
            assert_eq!(Answer::from_bytes(&bytes), Some(answer));
        }
        assert_eq!(Answer::from_bytes(&Answer::Joined { slot: 64, address }.to_bytes()), None);
    }

    proptest! {
        #[test]
        fn no_message_makes_a_reader_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..40),
            has_magic: bool,
        ) {
            let bytes = if has_magic { [&MAGIC[..], &bytes].concat() } else { bytes };
            let _ = (Request::from_bytes(&bytes), Answer::from_bytes(&bytes));
        }
    }
}
