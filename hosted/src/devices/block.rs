//! A disk (virtio 1.2, 5.2) from a file or a block device. Requests are done one after the other, when the driver asks.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use virtio_queue::desc::split::Descriptor;

use super::virtio::{Device, Ring};
use crate::{
    error::{Error, Result},
    memory::Memory,
};

const SECTOR: u64 = 512;
const FEATURE_READ_ONLY: u64 = 1 << 5;
const FEATURE_FLUSH: u64 = 1 << 9;
const IDENTIFIER_LENGTH: usize = 20;

/// Kinds of requests.
mod request {
    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const IDENTIFY: u32 = 8;
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Done = 0,
    Failed = 1,
    Unsupported = 2,
}

/// The disk.
#[derive(Debug)]
pub struct Block {
    file: File,
    sectors: u64,
    read_only: bool,
}

impl Block {
    /// Opens a file, and keeps others from using it as a disk at the same time.
    ///
    /// # Errors
    /// If it is not there, may not be written to, is empty or in use.
    pub fn open(path: &Path, read_only: bool) -> Result<Self> {
        let opened = OpenOptions::new().read(true).write(!read_only).open(path);
        let mut file = opened.map_err(|error| {
            let named = Error::file("open the disk", path, &error);
            let hint = "`,ro` behind its name opens it for reading only";
            if error.kind() == io::ErrorKind::PermissionDenied { named.hint(hint) } else { named }
        })?;
        let how = if read_only { libc::LOCK_SH } else { libc::LOCK_EX };
        // SAFETY: It takes a descriptor that is open.
        if unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) } != 0 {
            return Err(Error::new(format!("the disk {} is in use", path.display()))
                .hint("two machines on one disk destroy its file system; `,ro` is for sharing"));
        }
        let bytes =
            file.seek(SeekFrom::End(0)).map_err(|error| Error::file("measure the disk", path, error))?;
        if bytes < SECTOR {
            return Err(Error::new(format!("the disk {} is empty", path.display())));
        }
        Ok(Self { file, sectors: bytes / SECTOR, read_only })
    }

    /// Does a request. Says how many bytes of the guest's memory were written.
    fn perform(&mut self, parts: &[Descriptor], memory: &Memory) -> u32 {
        let [header, data @ .., status] = parts else { return 0 };
        let mut words = [0; 16];
        if header.len() < 16 || memory.read(header.addr().0, &mut words).is_none() || !status.is_write_only()
        {
            return 0;
        }
        let [kind, _, low, high] = [0, 4, 8, 12]
            .map(|at| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
        let sector = u64::from(high) << 32 | u64::from(low);
        let (how, written) = self.request(kind, sector, data, memory);
        match memory.write(status.addr().0, &[how as u8]) {
            Some(()) => written + 1,
            None => 0,
        }
    }

    fn request(&mut self, kind: u32, sector: u64, data: &[Descriptor], memory: &Memory) -> (Status, u32) {
        let transferred = match kind {
            request::READ => self.transfer(sector, data, memory, true),
            request::WRITE if self.read_only => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            request::WRITE => self.transfer(sector, data, memory, false),
            request::FLUSH => self.file.sync_data().map(|()| 0),
            request::IDENTIFY => Ok(identify(data, memory)),
            _ => return (Status::Unsupported, 0),
        };
        match transferred {
            Ok(bytes) => (Status::Done, bytes),
            Err(_) => (Status::Failed, 0),
        }
    }

    fn transfer(&self, sector: u64, data: &[Descriptor], memory: &Memory, reads: bool) -> io::Result<u32> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
        let total: u64 = data.iter().map(|part| u64::from(part.len())).sum();
        let end = sector.checked_add(total.div_ceil(SECTOR)).ok_or_else(wrong)?;
        if end > self.sectors || !total.is_multiple_of(SECTOR) {
            return Err(wrong());
        }
        let mut at = sector * SECTOR;
        for part in data {
            let length = u64::from(part.len());
            let start = memory.pointer(part.addr().0, length).ok_or_else(wrong)?;
            if part.is_write_only() != reads {
                return Err(wrong());
            }
            // SAFETY: The range is the guest's memory, which stays mapped; the guest does not run while a request is done.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start, length as usize) };
            if reads { self.file.read_exact_at(bytes, at) } else { self.file.write_all_at(bytes, at) }?;
            at += length;
        }
        Ok(if reads { u32::try_from(total).unwrap_or(u32::MAX - 1) } else { 0 })
    }
}

impl Device for Block {
    fn number(&self) -> u32 {
        2
    }

    fn features(&self) -> u64 {
        FEATURE_FLUSH | if self.read_only { FEATURE_READ_ONLY } else { 0 }
    }

    fn configuration(&self) -> Vec<u8> {
        self.sectors.to_le_bytes().to_vec()
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &Memory, _: u64) -> bool {
        let [ring] = rings else { return false };
        while let Some(chain) = ring.pop() {
            let head = chain.head_index();
            let parts: Vec<Descriptor> = chain.collect();
            ring.used(head, self.perform(&parts, memory));
        }
        false
    }
}

fn identify(data: &[Descriptor], memory: &Memory) -> u32 {
    let mut name = [0; IDENTIFIER_LENGTH];
    name[..14].copy_from_slice(b"mercury-hosted");
    let part = data.iter().find(|part| part.is_write_only() && part.len() as usize >= IDENTIFIER_LENGTH);
    match part.and_then(|part| memory.write(part.addr().0, &name)) {
        Some(()) => IDENTIFIER_LENGTH as u32,
        None => 0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{
        super::testing::{self, BUFFERS, Driver, with_driver},
        *,
    };
    use proptest::prelude::*;

    const HEADER: u64 = BUFFERS;
    const DATA: u64 = BUFFERS + 0x1000;
    const STATUS: u64 = BUFFERS + 0x2000;

    fn disk() -> Block {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0x5A; 4096]).unwrap();
        Block::open(file.path(), false).unwrap()
    }

    /// One request of a header, data and a status.
    fn request(driver: &mut Driver<'_>, kind: u32, sector: u64, reads: bool) -> u8 {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        driver.memory.write(HEADER, &header).unwrap();
        driver.memory.write(STATUS, &[0xFF]).unwrap();
        driver.begin(1 << 32, 1);
        driver.offer(0, 0, &[(HEADER, 16, false), (DATA, 512, reads), (STATUS, 1, true)]);
        assert!(driver.notify(0));
        assert_eq!(driver.used(0).len(), 1);
        driver.bytes(STATUS, 1)[0]
    }

    #[test]
    fn sectors_are_written_and_read_and_others_refused() {
        with_driver(disk(), |driver| {
            driver.memory.write(DATA, &[7; 512]).unwrap();
            assert_eq!(request(driver, request::WRITE, 3, false), 0);
            driver.memory.write(DATA, &[0; 512]).unwrap();
            assert_eq!(request(driver, request::READ, 3, true), 0);
            assert_eq!(driver.bytes(DATA, 512), [7; 512]);
            // Behind the end; a number that wraps; into what may only be read; of an unknown kind.
            assert_eq!(request(driver, request::READ, 8, true), 1);
            assert_eq!(request(driver, request::WRITE, u64::MAX, false), 1);
            assert_eq!(request(driver, request::READ, 0, false), 1);
            assert_eq!(request(driver, 77, 0, true), 2);
            assert_eq!(driver.transport.read(0x100, 8), 8);
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(disk(), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(disk(), |driver| testing::give_chains(driver, 1, &chains));
        }
    }
}
