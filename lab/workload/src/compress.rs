//! zstd alone on a file's content, for comparison with a stream of memory. The time to read the
//! file does not count.

use core::arch::x86_64::_rdtsc;
use std::{
    fs::File,
    io::{self, Read, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use crate::{Result, report::Report};

/// Bytes given to zstd at once.
const PIECE: usize = 1 << 20;

/// The file to compress.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// zstd's level
    #[arg(long, default_value_t = 1)]
    level: i32,
    /// The file
    file: PathBuf,
}

/// A counter of the compressed bytes.
struct Sink(u64);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Compresses the file once, in one thread.
pub fn run(args: &Args, report: &mut Report) -> Result<()> {
    let mut file = File::open(&args.file)?;
    let mut encoder = zstd::Encoder::new(Sink(0), args.level)?;
    let mut piece = vec![0; PIECE];
    let (mut bytes, mut took, mut ticks) = (0, Duration::ZERO, 0);
    loop {
        let count = file.read(&mut piece)?;
        if count == 0 {
            break;
        }
        let (begun, tsc) = (Instant::now(), tsc());
        encoder.write_all(&piece[..count])?;
        (bytes, took, ticks) = (bytes + count as u64, took + begun.elapsed(), ticks + self::tsc() - tsc);
    }
    let sink = encoder.finish()?;
    report.pass();
    report.fact("bytes", bytes);
    report.fact("compressed", sink.0);
    report.fact("seconds", took.as_secs_f64());
    report.fact("ticks", ticks);
    Ok(())
}

fn tsc() -> u64 {
    // SAFETY: reads a counter.
    unsafe { _rdtsc() }
}
