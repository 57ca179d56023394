//! The work of a machine while its image is streamed, and the speed of streaming.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::{ask, label, number};
use crate::stats::{Ratio, median, rounded};
use mercury_lab::{
    error::{Error, Result},
    kernel::Kernel,
    machine::Machine,
    spec::{Bus, Qemu, Spec},
};

const MEMORY_MIB: u32 = 1024;
/// The disk for the image, and the file for its contents as a core.
const IMAGE: &str = "/dev/vda";
const CORE: &str = "/dev/vdb";
/// The compression level of both.
const LEVEL: i32 = 1;
const LIMIT: Duration = Duration::from_secs(900);
/// Time until the caches are in a steady state.
const WARM_UP: Duration = Duration::from_secs(15);

/// Ratios of measurements in one run.
#[derive(Clone, Debug, Serialize)]
pub struct Streaming {
    /// Transactions per second while the image is streamed, divided by those before and after.
    pub during_over_before: Ratio,
    /// The same ratio over the whole command, pause included.
    pub command_over_before: Ratio,
    /// The difference between transactions per second without streaming and those around them.
    #[serde(serialize_with = "rounded")]
    pub noise: f64,
    /// Transactions per second without streaming; the median.
    #[serde(serialize_with = "rounded")]
    pub transactions_per_second: f64,
    /// Seconds of streaming; the median.
    #[serde(serialize_with = "rounded")]
    pub seconds: f64,
    /// Memory streamed per second in an idle machine, divided by the rate of zstd alone on the same
    /// data in one thread.
    pub rate_over_zstd: Ratio,
    /// Bytes of memory per second; the median.
    pub bytes_per_second: u64,
    /// The image's size, divided by that of zstd on the same data.
    pub size_over_zstd: Ratio,
    /// Instructions of zstd alone, divided by those of streaming, on one CPU that does all the work
    /// of both.
    #[serde(serialize_with = "rounded")]
    pub rate_over_zstd_counted: f64,
    pub machine: String,
}

fn spec() -> Spec {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(MEMORY_MIB);
    spec.disk(Bus::Virtio, 2048).disk(Bus::Virtio, 2048).qemu_version(Qemu::Newer)
}

/// Measures with so many alternations of so many seconds each, and so many machines for the rate.
///
/// # Errors
/// If a machine fails.
pub fn measure(alternations: usize, quiet: Duration, machines: usize) -> Result<Streaming> {
    let throughput = throughput(alternations, quiet)?;
    let rates = (0..machines).map(|_| rate()).collect::<Result<Vec<_>>>()?;
    let ratios = |of: fn(&Rate) -> f64| Ratio::of(&rates.iter().map(of).collect::<Vec<_>>());
    Ok(Streaming {
        during_over_before: Ratio::of(&throughput.during),
        command_over_before: Ratio::of(&throughput.command),
        noise: throughput.noise,
        transactions_per_second: throughput.transactions_per_second,
        seconds: throughput.seconds,
        rate_over_zstd: ratios(|one| one.image / one.zstd),
        bytes_per_second: median(&rates.iter().map(|one| one.image).collect::<Vec<_>>()) as u64,
        size_over_zstd: ratios(|one| one.size),
        rate_over_zstd_counted: counted()?,
        machine: spec().summary(),
    })
}

struct Throughput {
    during: Vec<f64>,
    command: Vec<f64>,
    noise: f64,
    transactions_per_second: f64,
    seconds: f64,
}

/// The time of a command in the machine's wall time, and the time in which it streamed.
#[derive(Clone, Copy, Debug)]
struct Span {
    begun: f64,
    ended: f64,
    streamed: f64,
}

/// Measures the throughput with one client, so that a CPU is free: quiet times and checkpoints in
/// turn.
fn throughput(alternations: usize, quiet: Duration) -> Result<Throughput> {
    let machine = Machine::boot(spec())?;
    machine.start_postgres()?;
    machine.mercury("load")?;
    // A client that waits for the disk at each commit would not notice other computations.
    let pgbench = machine
        .command("export PGOPTIONS='-c synchronous_commit=off'; exec pgbench -n -c 1 -T 100000 bench")
        .timeout(LIMIT * 10)
        .spawn()?;
    std::thread::sleep(WARM_UP);
    let mut spans = Vec::new();
    for _ in 0..alternations {
        std::thread::sleep(quiet);
        spans.push(span(&machine)?);
    }
    std::thread::sleep(quiet);
    let ended = time(&machine)?;
    pgbench.kill(15)?;
    drop(pgbench);
    let first = spans.first().map_or(0.0, |span| span.begun) - quiet.as_secs_f64();
    let times = format!(
        "select extract(epoch from mtime) from pgbench_history where mtime >= to_timestamp({first}) at time \
         zone 'UTC' order by 1"
    );
    let times =
        machine.command(&format!("TZ=UTC PGTZ=UTC psql -At bench -c \"{times}\"")).timeout(LIMIT).run()?;
    let times: Vec<f64> = times.check()?.stdout.lines().filter_map(|line| line.parse().ok()).collect();
    machine.check_health()?;
    machine.shut_down()?;
    evaluate(&times, &spans, first, ended)
}

fn time(machine: &Machine) -> Result<f64> {
    let said = machine.sh("date +%s.%N")?;
    said.parse().map_err(|_| Error::Host(format!("`date` says {said}")))
}

/// Makes a checkpoint at work.
fn span(machine: &Machine) -> Result<Span> {
    let line = format!(
        "date +%s.%N; mercury --json checkpoint --level {LEVEL} --overwrite {IMAGE} > /run/said || cat \
         /run/said; date +%s.%N; cat /run/said"
    );
    let said = machine.command(&line).timeout(LIMIT).run()?.check()?.stdout;
    let mut words = said.splitn(3, '\n');
    let mut next = || words.next().unwrap_or_default();
    let (begun, ended, report) = (next().parse(), next().parse(), serde_json::from_str::<Value>(next()));
    let (Ok(begun), Ok(ended), Ok(report)) = (begun, ended, report) else {
        return Err(machine.blame(Error::Host(format!("a checkpoint at work: {said}"))));
    };
    let streamed = number(&report, "stream_seconds")?;
    println!("    a checkpoint at work: {:.1} s, streamed in {streamed:.1} s", ended - begun);
    Ok(Span { begun, ended, streamed })
}

/// Returns the transactions per second in each span, from the time of each transaction.
fn evaluate(times: &[f64], spans: &[Span], first: f64, last: f64) -> Result<Throughput> {
    let per_second = |from: f64, to: f64| {
        let count = times.iter().filter(|time| (from..to).contains(*time)).count();
        count as f64 / (to - from)
    };
    let begins = spans.iter().map(|span| span.begun).chain([last]);
    let ends = [first].into_iter().chain(spans.iter().map(|span| span.ended));
    let quiet: Vec<f64> = ends.zip(begins).map(|(from, to)| per_second(from, to)).collect();
    if quiet.contains(&0.0) {
        return Err(Error::Host(format!("nothing was done without a checkpoint: {quiet:?}")));
    }
    let around: Vec<f64> = quiet.windows(2).map(|pair| f64::midpoint(pair[0], pair[1])).collect();
    let by = |of: &dyn Fn(&Span) -> f64| {
        spans.iter().zip(&around).map(|(span, around)| of(span) / around).collect()
    };
    let alone = quiet.windows(3).map(|three| three[1] / f64::midpoint(three[0], three[2]));
    Ok(Throughput {
        during: by(&|span| per_second((span.ended - span.streamed).max(span.begun), span.ended)),
        command: by(&|span| per_second(span.begun, span.ended)),
        noise: alone.map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max),
        transactions_per_second: median(&quiet),
        seconds: median(&spans.iter().map(|span| span.streamed).collect::<Vec<_>>()),
    })
}

/// Bytes per second, and the ratio of the sizes.
struct Rate {
    image: f64,
    zstd: f64,
    size: f64,
}

/// Measures a machine that has worked: its image, and the same memory by zstd alone. Each round has
/// a machine of its own, since the core's traces would be in the next image.
fn rate() -> Result<Rate> {
    let machine = Machine::boot(spec())?;
    machine.start_postgres()?;
    machine.command("pgbench -n -c 2 -T 10 bench").run()?.check()?;
    let (report, zstd) = image_and_zstd(&machine, "")?;
    machine.shut_down()?;
    let image = number(&report, "memory")? / number(&report, "stream_seconds")?;
    let alone = number(&zstd, "bytes")? / number(&zstd, "seconds")?;
    println!("    {:.0} MB/s, zstd alone {:.0} MB/s", image / 1e6, alone / 1e6);
    Ok(Rate { image, zstd: alone, size: number(&report, "image")? / number(&zstd, "compressed")? })
}

fn image_and_zstd(machine: &Machine, options: &str) -> Result<(Value, Value)> {
    machine.mercury("load")?;
    let checkpoint = format!("mercury --json checkpoint --level {LEVEL} --overwrite {options} {IMAGE}");
    let report = ask(machine, &checkpoint, LIMIT)?;
    let core = format!(
        "mkfs.ext4 -q {CORE} && mkdir -p /run/core && mount {CORE} /run/core && mercury inspect --core \
         /run/core/core {IMAGE}"
    );
    machine.command(&core).timeout(LIMIT).run()?.check()?;
    let zstd = ask(machine, &format!("mercury-workload compress --level {LEVEL} /run/core/core"), LIMIT)?;
    Ok((report, zstd))
}

/// Counts on one CPU that counts instructions. The time that streaming waits for the disk is
/// included.
fn counted() -> Result<f64> {
    let spec = super::pause::counting_machine(512).disk(Bus::Virtio, 1024).disk(Bus::Virtio, 1024);
    let machine = Machine::boot(spec)?;
    let (report, zstd) = image_and_zstd(&machine, "")?;
    machine.shut_down()?;
    let image = number(&report, "stream_seconds")? / number(&report, "memory")?;
    let alone = number(&zstd, "seconds")? / number(&zstd, "bytes")?;
    println!("    {} instructions a byte, zstd alone {}", label(image * 1e9), label(alone * 1e9));
    Ok(alone / image)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_counted_in_their_time() {
        // Ten a second, except for a checkpoint from 10 to 20: none in its first two seconds, five
        // a second in the rest.
        let quiet = (0..100).chain(200..300).map(|tenth| f64::from(tenth) / 10.0);
        let streaming = (60..100).map(|fifth| f64::from(fifth) / 5.0);
        let times: Vec<f64> = quiet.chain(streaming).collect();
        let span = Span { begun: 10.0, ended: 20.0, streamed: 8.0 };
        let found = evaluate(&times, &[span], 0.0, 30.0).unwrap();
        assert_eq!((found.transactions_per_second, found.seconds), (10.0, 8.0));
        assert!((found.during[0] - 0.5).abs() < 0.01, "{:?}", found.during);
        assert!((found.command[0] - 0.4).abs() < 0.01, "{:?}", found.command);
        assert!(evaluate(&[], &[span], 0.0, 30.0).is_err());
    }
}
