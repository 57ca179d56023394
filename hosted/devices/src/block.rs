//! A disk (virtio 1.2, 5.2) in a file or a block device. Several requests are done at once, in any
//! order, if the host has rings for that ([`Requests`]). Otherwise they are done one after the
//! other, when the driver asks.
//!
//! A flush covers the writes of whose end the driver has been told before it asks for the flush.
//! These are the host's then.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    },
    path::Path,
};

use virtio_queue::desc::split::Descriptor;

use crate::{
    error::{Error, Result},
    memory::{self, View},
    requests::{Operation, Requests},
    signals::Waker,
    virtio::{Device, Ring},
};

const SECTOR: u64 = 512;
const FEATURE_READ_ONLY: u64 = 1 << 5;
const FEATURE_FLUSH: u64 = 1 << 9;
const IDENTIFIER_LENGTH: usize = 20;

/// The kinds of requests.
mod request {
    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const IDENTIFY: u32 = 8;
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Done = 0,
    Failed = 1,
    Unsupported = 2,
}

#[derive(Debug)]
pub struct Block {
    file: File,
    sectors: u64,
    read_only: bool,
    identifier: [u8; IDENTIFIER_LENGTH],
    requests: Option<Requests<Request>>,
}

/// A request that the host has.
#[derive(Debug)]
struct Request {
    head: u16,
    /// The place of the data, unless the request is a flush.
    data: Option<Data>,
    /// The address of the status byte.
    status: u64,
}

/// Parts of the guest's memory, and what they belong to on the disk.
#[derive(Debug)]
struct Data {
    parts: Vec<libc::iovec>,
    /// The position of the next byte on the disk.
    at: u64,
    total: u64,
    reads: bool,
}

/// Formats of images that a guest would find in place of its file system, by their first bytes.
const FORMATS: [(&[u8], &str); 5] = [
    (b"QFI\xFB", "QEMU's format (qcow2)"),
    (b"KDMV", "VMware's format (VMDK)"),
    (b"# Disk DescriptorFile", "VMware's format (VMDK)"),
    (b"vhdxfile", "Hyper-V's format (VHDX)"),
    (b"conectix", "Virtual PC's format (VHD)"),
];

fn format_of(file: &mut File) -> Option<&'static str> {
    let mut first = [0; 32];
    file.read_exact_at(&mut first, 0).ok()?;
    FORMATS.iter().find(|(magic, _)| first.starts_with(magic)).map(|(_, name)| *name)
}

/// Opens the content of a disk, and keeps others from using it as a disk at the same time. Returns its size
/// in bytes as well.
///
/// # Errors
/// If the file is missing, may not be written to, is empty or in use.
pub fn open_disk(path: &Path, read_only: bool) -> Result<(File, u64)> {
    // Before it is opened: a pipe would wait for its other end.
    let kind = fs::metadata(path).map(|metadata| metadata.file_type());
    if let Ok(kind) = kind
        && !kind.is_file()
        && !kind.is_block_device()
    {
        return Err(Error::new(format!("the disk {} is neither a file nor a block device", path.display()))
            .hint("a disk is a raw image or a partition"));
    }
    // Before it is opened for writing: that would end the machines that have it as a part of their memory.
    if !read_only
        && kind.as_ref().is_ok_and(fs::FileType::is_file)
        && let Ok(file) = File::open(path)
    {
        lock(&file, path, libc::LOCK_EX)?;
    }
    // The host's kernel refuses a device then that it has mounted.
    let alone = if kind.is_ok_and(|kind| kind.is_block_device()) && !read_only { libc::O_EXCL } else { 0 };
    let opened = OpenOptions::new().read(true).write(!read_only).custom_flags(alone).open(path);
    let mut file = opened.map_err(|error| {
        let named = Error::file("open the disk", path, &error);
        let hint = "append `,ro` to its name to open it read-only";
        if error.kind() == io::ErrorKind::PermissionDenied { named.hint(hint) } else { named }
    })?;
    lock(&file, path, if read_only { libc::LOCK_SH } else { libc::LOCK_EX })?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(|error| Error::file("measure the disk", path, error))?;
    if bytes < SECTOR {
        return Err(Error::new(format!("the disk {} is empty", path.display()))
            .hint("`truncate -s 4G` gives the file a size, and `mkfs.ext4` a file system"));
    }
    if bytes % SECTOR != 0 {
        return Err(Error::new(format!(
            "the disk {} has {bytes} bytes, which are no whole sectors of {SECTOR}",
            path.display()
        ))
        .hint("the file is cut off, or is no disk: `truncate -s %512` fills it up"));
    }
    if let Some(format) = format_of(&mut file) {
        return Err(Error::new(format!("the disk {} is an image of {format}", path.display()))
            .hint("convert it to a raw image with `qemu-img convert -O raw`"));
    }
    Ok((file, bytes))
}

/// Keeps others from using a file as a disk at the same time.
fn lock(file: &File, path: &Path, how: i32) -> Result<()> {
    // SAFETY: It takes a descriptor that is open.
    if unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) } == 0 {
        return Ok(());
    }
    Err(Error::new(format!("the disk {} is in use", path.display()))
        .hint("two machines that write to one disk destroy its file system: add `,ro` in both to share it"))
}

impl Block {
    /// Opens a file, and keeps others from using it as a disk at the same time.
    ///
    /// # Errors
    /// If the file is missing, may not be written to, is empty or in use.
    pub fn open(path: &Path, read_only: bool) -> Result<Self> {
        let (file, bytes) = open_disk(path, read_only)?;
        Ok(Self {
            file,
            sectors: bytes / SECTOR,
            read_only,
            identifier: identifier("mercury-hosted"),
            requests: None,
        })
    }

    /// Gives the disk another name by which the guest identifies it: at most twenty bytes.
    #[must_use]
    pub fn identified_as(mut self, name: &str) -> Self {
        self.identifier = identifier(name);
        self
    }

    /// Lets requests be done while the guest runs, if the host has rings. The waker is called when
    /// an answer has come.
    ///
    /// # Errors
    /// If it has not: requests are done one after the other.
    pub fn overlap(&mut self, waker: Waker) -> io::Result<()> {
        self.requests = Some(Requests::new(&self.file, waker)?);
        Ok(())
    }

    /// Returns the descriptor by which requests are made, if they may overlap.
    #[must_use]
    pub fn ring(&self) -> Option<RawFd> {
        self.requests.as_ref().map(Requests::descriptor)
    }

    /// Begins a request. Or it is done already: then how many bytes of the guest's memory were written.
    fn begin(&mut self, head: u16, parts: &[Descriptor], memory: &View) -> Option<u32> {
        let [header, data @ .., status] = parts else { return Some(0) };
        let mut words = [0; 16];
        if header.len() < 16
            || memory::read(memory, header.addr().0, &mut words).is_none()
            || !status.is_write_only()
        {
            return Some(0);
        }
        let [kind, _, low, high] = [0, 4, 8, 12]
            .map(|at| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
        let sector = u64::from(high) << 32 | u64::from(low);
        let status = status.addr().0;
        let reads = kind == request::READ;
        let data = match kind {
            request::WRITE if self.read_only => None,
            request::READ | request::WRITE => self.data(sector, data, memory, reads).map(Some),
            request::FLUSH => Some(None),
            request::IDENTIFY => {
                let written = self.identify(data, memory);
                return Some(answer(memory, status, Status::Done, written));
            }
            _ => return Some(answer(memory, status, Status::Unsupported, 0)),
        };
        let Some(data) = data else { return Some(answer(memory, status, Status::Failed, 0)) };
        let request = Request { head, data, status };
        let Some(requests) = &mut self.requests else { return Some(self.finish(&request, 0, memory)) };
        let (operation, parts) = match &request.data {
            None => (Operation::Flush, Vec::new()),
            Some(data) if data.reads => (Operation::Read(data.at), data.parts.clone()),
            Some(data) => (Operation::Write(data.at), data.parts.clone()),
        };
        // SAFETY: The parts are the guest's memory, which stays mapped.
        unsafe { requests.ask(operation, parts, request) };
        None
    }

    fn identify(&self, data: &[Descriptor], memory: &View) -> u32 {
        let is_room = |part: &&Descriptor| part.is_write_only() && part.len() as usize >= IDENTIFIER_LENGTH;
        let part = data.iter().find(is_room);
        match part.and_then(|part| memory::write(memory, part.addr().0, &self.identifier)) {
            Some(()) => IDENTIFIER_LENGTH as u32,
            None => 0,
        }
    }

    /// Returns the data of a request. Returns nothing if the disk or the memory has no such place.
    fn data(&self, sector: u64, data: &[Descriptor], memory: &View, reads: bool) -> Option<Data> {
        let total: u64 = data.iter().map(|part| u64::from(part.len())).sum();
        let end = sector.checked_add(total.div_ceil(SECTOR))?;
        if end > self.sectors || !total.is_multiple_of(SECTOR) {
            return None;
        }
        let parts = data.iter().map(|part| {
            let place = if reads { memory::buffer } else { memory::pointer };
            let start = place(memory, part.addr().0, part.len().into())?;
            (part.is_write_only() == reads)
                .then_some(libc::iovec { iov_base: start.cast(), iov_len: part.len() as usize })
        });
        Some(Data { parts: parts.collect::<Option<_>>()?, at: sector * SECTOR, total, reads })
    }

    /// Does the rest of a request of which so many bytes are done, and reports the result to the
    /// driver. Returns the number of bytes written to the guest's memory.
    fn finish(&self, request: &Request, done: u64, memory: &View) -> u32 {
        let transferred = match &request.data {
            None => self.file.sync_data().map(|()| 0),
            Some(data) => self.transfer(data, done).map(|()| data.received()),
        };
        match transferred {
            Ok(bytes) => answer(memory, request.status, Status::Done, bytes),
            Err(_) => answer(memory, request.status, Status::Failed, 0),
        }
    }

    fn transfer(&self, data: &Data, done: u64) -> io::Result<()> {
        let mut at = data.at;
        for part in &data.parts {
            let behind = at + part.iov_len as u64;
            let from = (data.at + done).clamp(at, behind);
            self.transfer_part(part, (from - at) as usize, from, data.reads)?;
            at = behind;
        }
        Ok(())
    }

    /// Reads or writes a part of the guest's memory, from its byte `skipped` on. The host's kernel
    /// uses the memory by its address, so its content may change meanwhile.
    fn transfer_part(
        &self,
        part: &libc::iovec,
        mut skipped: usize,
        mut from: u64,
        reads: bool,
    ) -> io::Result<()> {
        while skipped < part.iov_len {
            let (at, length) = (part.iov_base.wrapping_byte_add(skipped), part.iov_len - skipped);
            let (file, offset) = (self.file.as_raw_fd(), from.cast_signed());
            // SAFETY: `data` has checked that the guest's memory has the part. It stays mapped, and
            // Rust has no reference to it.
            let done = unsafe {
                match reads {
                    true => libc::pread(file, at, length, offset),
                    false => libc::pwrite(file, at, length, offset),
                }
            };
            match usize::try_from(done) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(done) => (skipped, from) = (skipped + done, from + done as u64),
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins what was asked of the ring, and ends what it has answered.
    fn submit(&mut self, ring: &mut Ring<'_>, memory: &View) {
        let Some(mut requests) = self.requests.take() else { return };
        requests.submit(|request, result| {
            let done = u64::try_from(result).unwrap_or(0);
            let total = request.data.as_ref().map_or(0, |data| data.total);
            let written = match result {
                // The host says when it wants to be asked again.
                _ if matches!(-result, libc::EAGAIN | libc::EINTR | libc::ECANCELED) => {
                    self.finish(&request, 0, memory)
                }
                ..0 => answer(memory, request.status, Status::Failed, 0),
                _ if done < total => self.finish(&request, done, memory),
                _ => {
                    let received = request.data.as_ref().map_or(0, Data::received);
                    answer(memory, request.status, Status::Done, received)
                }
            };
            ring.used(request.head, written);
        });
        self.requests = Some(requests);
    }
}

// SAFETY: The parts are the guest's memory, which any thread may use: Rust has no reference to it.
unsafe impl Send for Data {}

impl Data {
    /// Bytes that the guest's memory has got of it.
    fn received(&self) -> u32 {
        if self.reads { u32::try_from(self.total).unwrap_or(u32::MAX - 1) } else { 0 }
    }
}

/// Tells the driver how a request has ended. Says how many bytes of its memory were written in all.
fn answer(memory: &View, status: u64, how: Status, written: u32) -> u32 {
    memory::write(memory, status, &[how as u8]).map_or(0, |()| written + 1)
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

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, _: u64) -> bool {
        let [ring] = rings else { return false };
        self.submit(ring, memory);
        loop {
            while self.requests.as_ref().is_none_or(Requests::has_room) {
                let Some(chain) = ring.pop() else {
                    self.submit(ring, memory);
                    return false;
                };
                let head = chain.head_index();
                let parts: Vec<Descriptor> = chain.collect();
                if let Some(written) = self.begin(head, &parts, memory) {
                    ring.used(head, written);
                }
            }
            self.submit(ring, memory);
            if self.requests.as_ref().is_some_and(|requests| !requests.has_room()) {
                // The next answer comes with a call of the waker.
                return false;
            }
        }
    }

    fn reset(&mut self) {
        if let Some(requests) = &mut self.requests {
            requests.finish();
        }
    }

    fn is_idle(&self) -> bool {
        self.requests.as_ref().is_none_or(Requests::is_idle)
    }

    /// Returns the seconds and nanoseconds of a file's last change. Hosts date no block devices.
    fn changed(&self) -> [u64; 2] {
        time_of_change(&self.file)
    }
}

/// Returns the time at which a file changed last, or zeros for other things.
#[must_use]
pub fn time_of_change(file: &File) -> [u64; 2] {
    let mut of = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // The library's own function makes another call, which takes a path.
    // SAFETY: The file is open, and the kernel fills a structure of this shape.
    let stated = unsafe { libc::syscall(libc::SYS_fstat, file.as_raw_fd(), of.as_mut_ptr()) };
    // SAFETY: It was zero at first, and consists of numbers.
    let of = unsafe { of.assume_init() };
    if stated != 0 || of.st_mode & libc::S_IFMT != libc::S_IFREG {
        return [0; 2];
    }
    [of.st_mtime.cast_unsigned(), of.st_mtime_nsec.cast_unsigned()]
}

fn identifier(name: &str) -> [u8; IDENTIFIER_LENGTH] {
    let mut bytes = [0; IDENTIFIER_LENGTH];
    bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::{self, BUFFERS, Driver, with_driver, with_memory};
    use proptest::prelude::*;

    const HEADER: u64 = BUFFERS;
    const DATA: u64 = BUFFERS + 0x1000;
    const STATUS: u64 = BUFFERS + 0x2000;

    #[test]
    fn an_unusable_disk_is_refused_with_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let refused = || Block::open(&path, true).unwrap_err().message().to_owned();
        let given = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            refused()
        };
        assert!(given(&[0; 1000]).contains("has 1000 bytes"));
        let mut image = vec![0; 1024];
        for (magic, name) in FORMATS {
            image[..32].fill(0);
            image[..magic.len()].copy_from_slice(magic);
            assert!(given(&image).contains(name));
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(refused().contains("neither a file nor a block device"));
        fs::remove_dir(&path).unwrap();
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: The name is a string with its end.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(refused().contains("neither a file nor a block device"));
    }

    #[test]
    fn a_change_of_a_file_is_dated() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0x5A; 4096]).unwrap();
        let disk = Block::open(file.path(), true).unwrap();
        let before = disk.changed();
        assert!(before[0] > 0 && before == disk.changed());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
        file.as_file().set_modified(later).unwrap();
        assert_ne!(disk.changed(), before);
    }

    fn disk() -> Block {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0x5A; 4096]).unwrap();
        Block::open(file.path(), false).unwrap()
    }

    fn overlapping() -> Block {
        let mut disk = disk();
        disk.overlap(testing::waker()).unwrap();
        disk
    }

    /// Makes a request of a header, data and a status.
    fn request(driver: &mut Driver<'_>, kind: u32, sector: u64, reads: bool) -> u8 {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        driver.put(HEADER, &header).unwrap();
        driver.put(STATUS, &[0xFF]).unwrap();
        driver.begin(1 << 32, 1);
        driver.offer(0, 0, &[(HEADER, 16, false), (DATA, 512, reads), (STATUS, 1, true)]);
        let mut is_interrupted = driver.notify(0);
        let mut used = driver.used(0).len();
        while used == 0 {
            is_interrupted |= driver.poll();
            used += driver.used(0).len();
        }
        assert!(is_interrupted && used == 1);
        driver.bytes(STATUS, 1)[0]
    }

    #[test]
    fn sectors_are_written_and_read_and_others_refused() {
        sectors(disk());
    }

    #[test]
    fn a_disk_has_its_name() {
        with_driver(disk().identified_as("mercury-guest-disk-12"), |driver| {
            assert_eq!(request(driver, request::IDENTIFY, 0, true), 0);
            assert_eq!(driver.bytes(DATA, 20), b"mercury-guest-disk-1");
        });
        with_driver(disk(), |driver| {
            assert_eq!(request(driver, request::IDENTIFY, 0, true), 0);
            assert_eq!(driver.bytes(DATA, 15), b"mercury-hosted\0");
        });
    }

    #[test]
    fn and_so_they_are_if_requests_overlap() {
        sectors(overlapping());
    }

    fn sectors(disk: Block) {
        with_driver(disk, |driver| {
            driver.put(DATA, &[7; 512]).unwrap();
            assert_eq!(request(driver, request::WRITE, 3, false), 0);
            driver.put(DATA, &[0; 512]).unwrap();
            assert_eq!(request(driver, request::READ, 3, true), 0);
            assert_eq!(driver.bytes(DATA, 512), [7; 512]);
            // The requests: after the end; a number that wraps; into read-only memory; of an
            // unknown kind.
            assert_eq!(request(driver, request::READ, 8, true), 1);
            assert_eq!(request(driver, request::WRITE, u64::MAX, false), 1);
            assert_eq!(request(driver, request::READ, 0, false), 1);
            assert_eq!(request(driver, 77, 0, true), 2);
            assert_eq!(request(driver, request::FLUSH, 0, false), 0);
            assert_eq!(driver.transport.read(0x100, 8), 8);
        });
    }

    #[test]
    fn nothing_of_memory_is_used_after_a_reset() {
        with_driver(overlapping(), |driver| {
            for _ in 0..50 {
                let header = [&request::READ.to_le_bytes()[..], &[0; 12]].concat();
                driver.put(HEADER, &header).unwrap();
                driver.begin(1 << 32, 1);
                driver.offer(0, 0, &[(HEADER, 16, false), (DATA, 4096, true), (STATUS, 1, true)]);
                driver.notify(0);
                driver.write(0x70, 0);
                driver.put(DATA, &[9; 4096]).unwrap();
                driver.poll();
                assert_eq!(driver.bytes(DATA, 4096), [9; 4096]);
            }
        });
    }

    #[test]
    fn a_request_that_the_host_has_done_in_part_is_completed() {
        with_memory(|memory| {
            memory::write(memory, BUFFERS, &[1; 1024]).unwrap();
            let part =
                |at| libc::iovec { iov_base: memory::pointer(memory, at, 512).unwrap().cast(), iov_len: 512 };
            let data =
                Data { parts: vec![part(BUFFERS), part(BUFFERS + 512)], at: 1024, total: 1024, reads: false };
            let disk = disk();
            for done in [0, 1, 511, 512, 513, 1024] {
                disk.file.write_all_at(&[0; 4096], 0).unwrap();
                disk.transfer(&data, done).unwrap();
                let mut bytes = [0; 4096];
                disk.file.read_exact_at(&mut bytes, 0).unwrap();
                let written = 1024 + done as usize..2048;
                assert!((0..4096).all(|at| bytes[at] == u8::from(written.contains(&at))), "{done}");
            }
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(disk(), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_driver_makes_it_panic_if_requests_overlap(all in testing::anything()) {
            with_driver(overlapping(), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic_if_requests_overlap(chains in testing::chains()) {
            with_driver(overlapping(), |driver| {
                testing::give_chains(driver, 1, &chains);
                driver.write(0x70, 0);
            });
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(disk(), |driver| testing::give_chains(driver, 1, &chains));
        }
    }
}
