//! A copy of a disk that is written to, by the driver's dirty log of the disk. After the last write
//! the two disks are compared byte for byte.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use mercury_abi::{
    Header,
    ioctl::{
        DiskLogRequest, MERCURY_DISK_CHUNK_SHIFT_MIN, MERCURY_DISK_LOG_BEGIN, MERCURY_DISK_LOG_COLLECT,
        MERCURY_DISK_LOG_END, MERCURY_IOC_DISK_LOG,
    },
};

use crate::{Result, cpus::check, device, report::Report};

const CHUNK: usize = 1 << MERCURY_DISK_CHUNK_SHIFT_MIN;
/// Alignment of buffers for disks.
const ALIGN: usize = 4096;
/// A request number from linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;
/// The number of missed chunks that are reported one by one.
const SHOWN: u64 = 20;
/// Time for writes that are still under way.
const PATIENCE: Duration = Duration::from_secs(60);

/// The disks to copy.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk that is written to
    from: PathBuf,
    /// Another one of the same size
    to: PathBuf,
    /// Collections while it is written to
    #[arg(long, default_value_t = 8)]
    collections: u64,
    /// Report after that many collections, and wait for this file: no task writes to the disk any
    /// more
    #[arg(long)]
    wait_file: PathBuf,
    /// A file system on the disk, which is frozen then
    #[arg(long)]
    freeze: Option<PathBuf>,
}

/// Copies the disk.
pub fn run(args: &Args, report: &mut Report) -> Result<()> {
    let copy = Copy::begin(args)?;
    refuses_nonsense(&copy, report);
    let mut buffer = Buffer::new();
    let all = copy.chunks;
    for chunk in 0..all {
        copy.copy(chunk, &mut buffer)?;
    }
    let mut logged = 0;
    for _ in 0..args.collections {
        thread::sleep(Duration::from_millis(100));
        logged += copy.round(&mut buffer)?;
        report.pass();
    }
    println!("it has been copied while it was written to");
    while !args.wait_file.exists() {
        thread::sleep(Duration::from_millis(50));
    }
    let frozen = args.freeze.as_deref().map(Frozen::freeze).transpose()?;
    let (mut last, end) = (0, Instant::now() + PATIENCE);
    loop {
        let found = copy.round(&mut buffer)?;
        last += found;
        if found == 0 {
            break;
        }
        report.check(Instant::now() < end, || format!("{found} chunks are written, though no process may"));
        if Instant::now() >= end {
            break;
        }
    }
    let mut missed = 0;
    for chunk in 0..all {
        let is_missed = !copy.is_equal(chunk, &mut buffer)?;
        missed += u64::from(is_missed);
        report.check(!is_missed || missed > SHOWN, || {
            format!("chunk {chunk} was written, and is not in the log")
        });
    }
    drop(frozen);
    copy.ask(MERCURY_DISK_LOG_END, &mut [])?;
    report.check(copy.ask(MERCURY_DISK_LOG_END, &mut []).is_err(), || "it ends twice".into());
    report.fact("chunks", all);
    report.fact("logged_chunks", logged);
    report.fact("last_chunks", last);
    report.fact("missed_chunks", missed);
    Ok(())
}

/// Checks that the driver allows one dirty log at a time, only of a disk, and only with maps of the
/// right size.
fn refuses_nonsense(copy: &Copy, report: &mut Report) {
    let mut refused = |what: &str, answer: Result<DiskLogRequest>, code: &str| {
        let said = answer.map_or_else(|error| error.to_string(), |_| "it is taken".into());
        report.check(said.contains(code), || format!("{what}: {said}"));
    };
    refused("a second begin", copy.ask(MERCURY_DISK_LOG_BEGIN, &mut []), "disk-logged");
    refused("a short map", copy.ask(MERCURY_DISK_LOG_COLLECT, &mut [0]), "bad-argument");
    refused("no log", copy.ask_of(&copy.to, MERCURY_DISK_LOG_COLLECT, &mut []), "no-disk-log");
    refused("no disk", copy.ask_of(&copy.device, MERCURY_DISK_LOG_BEGIN, &mut []), "disk-unsupported");
    refused("a word too many", copy.ask(MERCURY_DISK_LOG_END + 1, &mut []), "bad-argument");
}

/// Bytes that are aligned for disks.
struct Buffer(Vec<u8>, usize);

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; 2 * CHUNK + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self(bytes, start)
    }

    fn halves(&mut self) -> (&mut [u8], &mut [u8]) {
        self.0[self.1..self.1 + 2 * CHUNK].split_at_mut(CHUNK)
    }
}

struct Copy {
    device: File,
    from: File,
    to: File,
    bytes: u64,
    chunks: u64,
}

impl Copy {
    fn begin(args: &Args) -> Result<Self> {
        let open = |path: &Path, write: bool| {
            OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT).open(path)
        };
        let (from, to) = (open(&args.from, false)?, open(&args.to, true)?);
        let bytes = size(&from)?;
        if size(&to)? != bytes {
            return Err("the two are not of the same size".into());
        }
        let mut copy = Self { device: device::open_to_control()?, from, to, bytes, chunks: 0 };
        copy.chunks = copy.ask(MERCURY_DISK_LOG_BEGIN, &mut [])?.chunks;
        Ok(copy)
    }

    fn ask(&self, what: u32, map: &mut [u64]) -> Result<DiskLogRequest> {
        self.ask_of(&self.from, what, map)
    }

    fn ask_of(&self, disk: &File, what: u32, map: &mut [u64]) -> Result<DiskLogRequest> {
        let mut request = DiskLogRequest {
            header: Header::of::<DiskLogRequest>(),
            what,
            disk_fd: disk.as_raw_fd() as u32,
            chunk_shift: MERCURY_DISK_CHUNK_SHIFT_MIN,
            map_addr: map.as_mut_ptr().expose_provenance() as u64,
            map_words: map.len() as u64,
            ..DiskLogRequest::default()
        };
        device::request(&self.device, MERCURY_IOC_DISK_LOG, &mut request)
            .map_err(|error| device::explain(error, request.outcome))?;
        Ok(request)
    }

    /// Copies the chunks written since the last call. Returns their number.
    fn round(&self, buffer: &mut Buffer) -> Result<u64> {
        let mut map = vec![0; self.chunks.div_ceil(64) as usize];
        let found = self.ask(MERCURY_DISK_LOG_COLLECT, &mut map)?.chunks;
        for chunk in (0..self.chunks).filter(|chunk| map[*chunk as usize / 64] >> (chunk % 64) & 1 == 1) {
            self.copy(chunk, buffer)?;
        }
        Ok(found)
    }

    /// Returns the place and the length of a chunk. The last chunk may be shorter.
    fn place(&self, chunk: u64) -> (u64, usize) {
        let start = chunk * CHUNK as u64;
        (start, (self.bytes - start).min(CHUNK as u64) as usize)
    }

    fn copy(&self, chunk: u64, buffer: &mut Buffer) -> Result<()> {
        let (start, length) = self.place(chunk);
        let (bytes, _) = buffer.halves();
        self.from.read_exact_at(&mut bytes[..length], start)?;
        Ok(self.to.write_all_at(&bytes[..length], start)?)
    }

    fn is_equal(&self, chunk: u64, buffer: &mut Buffer) -> Result<bool> {
        let (start, length) = self.place(chunk);
        let (ours, theirs) = buffer.halves();
        self.from.read_exact_at(&mut ours[..length], start)?;
        self.to.read_exact_at(&mut theirs[..length], start)?;
        Ok(ours[..length] == theirs[..length])
    }
}

fn size(disk: &File) -> io::Result<u64> {
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    let mut bytes = 0_u64;
    // SAFETY: it writes a word.
    check(unsafe { libc::ioctl(disk.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) })?;
    Ok(bytes)
}

/// A file system that is frozen until this value is dropped.
struct Frozen(File);

impl Frozen {
    fn freeze(at: &Path) -> io::Result<Self> {
        let folder = File::open(at)?;
        // SAFETY: it looks at no memory.
        check(unsafe { libc::ioctl(folder.as_raw_fd(), FIFREEZE, 0) })?;
        Ok(Self(folder))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: it looks at no memory.
        unsafe { libc::ioctl(self.0.as_raw_fd(), FITHAW, 0) };
    }
}
