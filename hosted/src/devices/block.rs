//! A disk (virtio 1.2, 5.2) from a file or a block device. Requests are done one after the other, when the driver asks.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use virtio_queue::{DescriptorChain, desc::split::Descriptor};

use super::virtio::View;
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
    /// Its number among virtio's devices.
    pub const DEVICE: u32 = 2;

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

    /// What it offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        FEATURE_FLUSH | if self.read_only { FEATURE_READ_ONLY } else { 0 }
    }

    /// A field of its configuration: of all of them only the size is not zero.
    #[must_use]
    pub fn configuration(&self, at: u64, size: usize) -> u64 {
        let bytes = self.sectors.to_le_bytes();
        let byte = |at: u64| bytes.get(at as usize).copied().unwrap_or(0);
        (0..size.min(8) as u64).rev().fold(0, |value, index| value << 8 | u64::from(byte(at + index)))
    }

    /// Does a request. Says how many bytes of the guest's memory were written.
    pub fn perform(&mut self, chain: DescriptorChain<&View>, memory: &Memory) -> u32 {
        let parts: Vec<Descriptor> = chain.collect();
        let [header, data @ .., status] = &parts[..] else { return 0 };
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

fn identify(data: &[Descriptor], memory: &Memory) -> u32 {
    let mut name = [0; IDENTIFIER_LENGTH];
    name[..14].copy_from_slice(b"mercury-hosted");
    let part = data.iter().find(|part| part.is_write_only() && part.len() as usize >= IDENTIFIER_LENGTH);
    match part.and_then(|part| memory.write(part.addr().0, &name)) {
        Some(()) => IDENTIFIER_LENGTH as u32,
        None => 0,
    }
}
