//! The checkpoint's part of docs/benchmarks.md, and the check of its promises.

use super::{Checkpoint, label, pause::Pause, peers::Way};
use crate::stats::Ratio;
use mercury_lab::markdown::{table, thousands};

/// The heading of this part.
pub const HEADING: &str = "## Checkpoint and rollback";

/// Upper bounds that the project promises.
const SNAPSHOT_AT_MOST: u64 = 5000;
const THROUGHPUT_AT_LEAST: f64 = 0.7;
const RATE_AT_LEAST: f64 = 0.5;

/// Returns this part of the page.
#[must_use]
pub fn section(figures: &Checkpoint) -> String {
    [head(figures), pauses(figures), peers(figures), streaming(figures), rollbacks(figures), kept(figures)]
        .join("\n")
}

fn head(figures: &Checkpoint) -> String {
    format!(
        "{HEADING}\n\n\
        `cargo run -p mercury-lab-bench -- bench checkpoint` writes this section alone. \
        It was measured on {}.\n\
        {}\n",
        figures.emulator,
        goals(figures)
    )
}

/// Returns the goals in words.
fn goals(figures: &Checkpoint) -> String {
    let kept = |is: bool| if is { "kept" } else { "**missed**" };
    let most = figures.snapshot_instructions.values().copied().max().unwrap_or(0);
    let streaming = &figures.streaming;
    format!(
        "The goals:\n\n\
        - The hypervisor's part of the pause takes at most {} instructions ({}: {}), \
        the same with all sizes of memory\n\
        ({}).\n\
        - The whole pause is flat within noise ({}).\n\
        - While an image is streamed, PostgreSQL is at least {THROUGHPUT_AT_LEAST} × as fast as before ({}: \
        {:.2}).\n\
        - An image is written at least {RATE_AT_LEAST} × as fast as by zstd alone ({}: {:.2}, \
        {:.2} to {:.2} in the\n\
        rounds{}).",
        thousands(SNAPSHOT_AT_MOST),
        kept(most <= SNAPSHOT_AT_MOST),
        thousands(most),
        kept(is_flat(figures)),
        wholes(&figures.pauses),
        kept(streaming.during_over_before.median >= THROUGHPUT_AT_LEAST),
        streaming.during_over_before.median,
        kept(streaming.rate_over_zstd.median >= RATE_AT_LEAST),
        streaming.rate_over_zstd.median,
        streaming.rate_over_zstd.low,
        streaming.rate_over_zstd.high,
        if streaming.rate_over_zstd.low < RATE_AT_LEAST { ": not in each" } else { "" },
    )
}

/// Compares the whole pause on the largest machine with that on the smallest, as far as rounds on
/// one machine agree. If they differ, says which step grows.
fn wholes(pauses: &[Pause]) -> String {
    let (Some(small), Some(large)) = (pauses.first(), pauses.last()) else { return "not measured".into() };
    let least = |pause: &Pause| pause.totals.iter().min().map_or(f64::NAN, |total| *total as f64);
    let most = |pause: &Pause| pause.totals.iter().max().map_or(f64::NAN, |total| *total as f64);
    let (low, high) = (least(large) / most(small), most(large) / least(small));
    let measured = format!(
        "{:.2} × as long with {} MiB as with {}, {low:.2} to {high:.2} in the rounds",
        large.total() / small.total(),
        thousands(large.memory_mib.into()),
        thousands(small.memory_mib.into())
    );
    if low <= 1.0 {
        return format!("kept: {measured}");
    }
    let growing = |pause: &Pause| pause.phases.search + pause.phases.copy_persistent;
    let rest = |pause: &Pause| pause.total() - growing(pause) as f64;
    format!(
        "**missed**: {measured}. The steps that grow search for persistent DMA memory and copy it: \
        {} instructions with\n\
        {} MiB, {} with {}. The rest is {:.2} × as long",
        thousands(growing(small)),
        thousands(small.memory_mib.into()),
        thousands(growing(large)),
        thousands(large.memory_mib.into()),
        rest(large) / rest(small)
    )
}

fn is_flat(figures: &Checkpoint) -> bool {
    let mut all = figures.snapshot_instructions.values();
    let first = all.next();
    all.all(|one| Some(one) == first)
}

fn pauses(figures: &Checkpoint) -> String {
    let pauses = &figures.pauses;
    let names = pauses.first().map(|pause| pause.phases.named().map(|(name, _)| name));
    let row = |(index, name): (usize, &'static str)| {
        let cells = pauses.iter().map(|pause| thousands(pause.phases.named()[index].1));
        [name.to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<String>> = names.into_iter().flatten().enumerate().map(row).collect();
    let mut add = |name: &str, cell: &dyn Fn(&Pause) -> String| {
        rows.push([name.to_owned()].into_iter().chain(pauses.iter().map(cell)).collect());
    };
    add("**the whole**", &|pause| thousands(pause.total() as u64));
    add("the whole, least and most", &|pause| {
        let (least, most) = (pause.totals.iter().min(), pause.totals.iter().max());
        format!("{} – {}", thousands(least.copied().unwrap_or(0)), thousands(most.copied().unwrap_or(0)))
    });
    add("pages of memory", &|pause| thousands(pause.memory_pages));
    add("of which persistent DMA memory", &|pause| thousands(pause.persistent_pages));
    let sizes: Vec<String> =
        pauses.iter().map(|pause| format!("{} MiB", thousands(pause.memory_mib.into()))).collect();
    let header: Vec<&str> = ["instructions"].into_iter().chain(sizes.iter().map(String::as_str)).collect();
    let least = pauses.iter().map(Pause::total).fold(f64::INFINITY, f64::min);
    let most = pauses.iter().map(Pause::total).fold(0.0, f64::max);
    format!(
        "### The pause\n\n\
        `mercury snapshot` on an idle machine with one CPU, {} times with each size of memory; \
        the figures are\n\
        medians. A tick is an instruction. Where the kernel waits for a device or a timer, \
        a tick is a nanosecond of\n\
        the machine's time, which does not depend on the host's.\n\n\
        The hypervisor's part is \"CPU saved\", \"all of memory protected\" and an exit and back ({}). \
        It is without the\n\
        copy of persistent DMA memory, which the hypervisor also makes, on one CPU while the others wait. \
        The search\n\
        for this memory reads all pages in use and skips free blocks. \
        Search and copy grow with the memory that the\n\
        kernel itself uses. The search also grows with every page of files and processes. \
        The whole is {:.2} × as long\n\
        on the largest machine as on the smallest.\n\n\
        Where file systems are mounted for writing, `mercury checkpoint` first freezes applications and file \
        systems,\n\
        for as long as writing back takes (`hold` in its report).\n\n{}",
        pauses.first().map_or(0, |pause| pause.rounds),
        pauses.first().map_or(0, |pause| pause.exit_instructions),
        most / least,
        table(&header, &rows)
    )
}

fn peers(figures: &Checkpoint) -> String {
    let times =
        |ratio: Option<f64>| ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{} ×", label(ratio)));
    let row = |way: &Way| {
        vec![
            way.name.to_owned(),
            way.pause_seconds.map_or_else(|| "for good".to_owned(), |pause| format!("{} s", label(pause))),
            format!("{} s", label(way.total_seconds)),
            format!("{:.0} MB", way.image_bytes / 1e6),
            times(way.pause_over_mercury),
            times(Some(way.total_over_mercury)),
            times(Some(way.image_over_mercury)),
        ]
    };
    let rows: Vec<Vec<String>> = figures.peers.ways.iter().map(row).collect();
    format!(
        "### The same job by other means\n\n\
        Measured on {}, with PostgreSQL and pgbench's database, which has worked and is at rest. \
        Each way ran {}\n\
        times, in turn, in one run; the figures are medians. Times are those of an emulator on a shared \
        host, so look\n\
        at the ratios.\n\n\
        - **Pauses** of Mercury and of hibernation are the longest time without a wake-up of a process that \
        wakes up\n\
        each millisecond. Those of QEMU and CRIU are their own reports, \
        or the command's time where the machine stands\n\
        still for all of it.\n\
        - **Mercury's image** is compressed by zstd and has all memory that is not free.\n\
        - **Hibernation** is measured until its image is written, by the kernel's `test_resume`, \
        which ends there on\n\
        6.1. In real use power-off, firmware, another boot and reading the image come on top, \
        and no task runs\n\
        meanwhile.\n\
        - **QEMU's ways** need a virtual machine. They do not compress, \
        and QEMU works at the host's speed while\n\
        everything else here is emulated. `migrate` sends memory while the machine runs, \
        and stops the machine for the\n\
        rest.\n\
        - **CRIU** dumps PostgreSQL's processes (`--leave-running`), without the kernel, \
        the files and all other\n\
        processes.\n\
        - **kdump** is a panic, after which running work is lost. The dump is for analysis only: \
        it is compressed by\n\
        zlib, without free pages, caches and processes. Its time includes the crash kernel's boot.\n\n{}",
        figures.peers.machine,
        figures.peers.rounds,
        table(
            &["", "pause", "until complete", "image", "pause ÷ Mercury", "time ÷ Mercury", "image ÷ Mercury"],
            &rows
        )
    )
}

fn streaming(figures: &Checkpoint) -> String {
    let streaming = &figures.streaming;
    let row = |name: &str, ratio: &Ratio, goal: &str| {
        let interval = format!("{:.2} – {:.2}", ratio.low, ratio.high);
        vec![name.to_owned(), format!("{:.2}", ratio.median), interval, goal.to_owned()]
    };
    let rows = [
        row("transactions a second while streaming ÷ before and after", &streaming.during_over_before, "0.7"),
        row("the same over the whole command", &streaming.command_over_before, ""),
        row("bytes of memory a second ÷ zstd alone", &streaming.rate_over_zstd, "0.5"),
        vec![
            "the same on one CPU, in instructions".to_owned(),
            format!("{:.2}", streaming.rate_over_zstd_counted),
            String::new(),
            String::new(),
        ],
        row("image ÷ zstd alone", &streaming.size_over_zstd, ""),
    ];
    format!(
        "### While the image is streamed\n\n\
        Measured on {}. One client of pgbench runs (TPC-B, {:.0} transactions a second), \
        so that one CPU is free.\n\
        Quiet times and checkpoints take turns. Streaming took {:.1} s meanwhile. The noise is ±{:.2}: \
        the largest\n\
        difference between transactions a second without a checkpoint and those around them.\n\n\
        The rate is that of an idle machine that has worked, {:.0} MB of memory a second. \
        It is divided by the rate of\n\
        zstd on a core of the same memory, in one thread and at the same level, \
        without the time to read the core.\n\
        Each measurement has a fresh machine. On one CPU everything that streaming does counts against zstd \
        alone. On\n\
        two CPUs the other work runs beside the compression.\n\n{}",
        streaming.machine,
        streaming.transactions_per_second,
        streaming.seconds,
        streaming.noise,
        streaming.bytes_per_second as f64 / 1e6,
        table(&["ratio", "median", "95 %", "at least"], &rows)
    )
}

fn rollbacks(figures: &Checkpoint) -> String {
    let rows: Vec<Vec<String>> = figures
        .rollbacks
        .iter()
        .map(|one| {
            vec![
                format!("{} MiB", one.written_mib),
                thousands(one.pages),
                thousands(one.meet_instructions),
                thousands(one.work_instructions),
                thousands(one.work_instructions / one.pages.max(1)),
            ]
        })
        .collect();
    format!(
        "### Rollback\n\n\
        `mercury rollback` to a snapshot in memory, after the test has written so much, \
        in instructions on one CPU. In\n\
        addition devices get 3 ms to come to rest, and resume as after a snapshot.\n\n{}",
        table(
            &["written", "pages restored", "until the rendezvous", "until all is in place", "a page"],
            &rows
        )
    )
}

fn kept(figures: &Checkpoint) -> String {
    let kept = &figures.kept;
    let bytes = |memory: &crate::counts::Memory| {
        thousands((memory.fixed_bytes + memory.per_cpu_bytes * memory.possible_cpus) / 1024)
    };
    format!(
        "### Memory besides the pool\n\n\
        While native, the driver accounts for {} KiB before the first checkpoint and {} KiB after the last \
        one, with\n\
        {} checkpoints in between. Each checkpoint after the first one took {:.0} KiB of the memory that the \
        kernel\n\
        has free once its caches are dropped. A negative number means more free memory than before. \
        Some hundred KiB\n\
        either way are the kernel's own. `checkpoints_leave_no_memory_behind` in lab/bench/tests/speed.rs \
        measures the\n\
        slope over thirty checkpoints, and compares it with the same work without a checkpoint.\n",
        bytes(&kept.before),
        bytes(&kept.after),
        kept.checkpoints,
        kept.lost_kib_each
    )
}

/// Returns the promises that do not depend on the clock. Each is true if kept, with the words for a
/// broken one.
#[must_use]
pub fn promises(figures: &Checkpoint) -> [(bool, &'static str); 3] {
    [
        (
            figures.snapshot_instructions.values().all(|count| *count <= SNAPSHOT_AT_MOST),
            "a snapshot is longer than promised",
        ),
        (is_flat(figures), "a snapshot depends on the size of memory"),
        (figures.kept.before == figures.kept.after, "checkpoints leave memory behind"),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::report::judge;
    use crate::{
        checkpoint::{
            pause::Phases,
            peers::Peers,
            rollback::{Kept, Rollback},
            streaming::Streaming,
        },
        counts::Memory,
    };
    use mercury_lab::markdown::replace_section;

    /// Returns the figures of a machine that keeps all promises.
    pub fn figures() -> Checkpoint {
        let pause = |memory_mib| Pause {
            memory_mib,
            rounds: 5,
            snapshot_instructions: 4600,
            snapshot_instructions_min: 4600,
            exit_instructions: 95,
            phases: Phases {
                save: 4253,
                hypervisor: 347,
                search: u64::from(memory_mib) * 1000,
                ..Phases::default()
            },
            totals: vec![25_000_000, 25_100_000, 25_200_000],
            measured_ns: vec![25_300_000],
            persistent_pages: 4000,
            memory_pages: 100_000,
        };
        let memory = Memory { fixed_bytes: 1 << 20, per_cpu_bytes: 40 << 10, possible_cpus: 2 };
        let ratio = |median| Ratio { median, low: median - 0.1, high: median + 0.1 };
        let way = |name, pause_seconds| Way {
            name,
            pause_seconds,
            total_seconds: 12.0,
            image_bytes: 2e8,
            pause_over_mercury: pause_seconds.map(|pause| pause / 0.2),
            total_over_mercury: 1.0,
            image_over_mercury: 1.0,
        };
        Checkpoint {
            snapshot_instructions: BTreeMap::from([(512, 4600), (12_288, 4600)]),
            throughput_during_over_before: 0.75,
            image_rate_over_zstd: 0.6,
            emulator: "QEMU emulator version 11".into(),
            pauses: vec![pause(512), pause(12_288)],
            peers: Peers {
                ways: vec![way("Mercury", Some(0.2)), way("a dump", None)],
                rounds: 3,
                machine: "two CPUs".into(),
            },
            streaming: Streaming {
                during_over_before: ratio(0.75),
                command_over_before: ratio(0.7),
                noise: 0.05,
                transactions_per_second: 100.0,
                seconds: 9.0,
                rate_over_zstd: ratio(0.6),
                bytes_per_second: 50_000_000,
                size_over_zstd: ratio(0.9),
                rate_over_zstd_counted: 0.55,
                machine: "two CPUs".into(),
            },
            rollbacks: vec![Rollback {
                written_mib: 8,
                pages: 3000,
                meet_instructions: 5000,
                work_instructions: 3_000_000,
            }],
            kept: Kept { before: memory, after: memory, checkpoints: 10, lost_kib_each: 3.0 },
        }
    }

    #[test]
    fn the_part_has_every_figure() {
        let squeezed = section(&figures()).split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "| CPU saved | 4,253 | 4,253 |",
            "| search for persistent DMA memory | 512,000 | 12,288,000 |",
            "| Mercury | 0.20 s | 12.0 s | 200 MB | 1.00 × | 1.00 × | 1.00 × |",
            "| a dump | for good | 12.0 s | 200 MB | – | 1.00 × | 1.00 × |",
            "| transactions a second while streaming ÷ before and after | 0.75 | 0.65 – 0.85 | 0.7 |",
            "| 8 MiB | 3,000 | 5,000 | 3,000,000 | 1,000 |",
            "(kept: 0.75)",
            "1,104 KiB before",
        ] {
            assert!(squeezed.contains(part), "{part:?} is not in\n{squeezed}");
        }
    }

    #[test]
    fn growth_with_memory_is_reported() {
        let mut figures = figures();
        let said = |figures: &Checkpoint| section(figures).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            said(&figures)
                .contains("(kept: 1.00 × as long with 12,288 MiB as with 512, 0.99 to 1.01 in the rounds)")
        );
        assert!(said(&figures).contains("(kept: 0.60, 0.50 to 0.70 in the rounds)"));
        figures.pauses[1].totals = vec![50_000_000, 50_200_000, 50_400_000];
        figures.streaming.rate_over_zstd.low = 0.4;
        let said = said(&figures);
        assert!(
            said.contains(
                "**missed**: 2.00 × as long with 12,288 MiB as with 512, 1.98 to 2.02 in the rounds."
            ),
            "{said}"
        );
        assert!(said.contains("512,000 instructions with 512 MiB, 12,288,000 with 12,288."), "{said}");
        assert!(said.contains("The rest is 1.54 × as long"), "{said}");
        assert!(said.contains("(kept: 0.60, 0.40 to 0.70 in the rounds: not in each)"), "{said}");
    }

    #[test]
    fn missed_aims_are_reported() {
        let mut missed = figures();
        missed.streaming.during_over_before.median = 0.5;
        assert!(section(&missed).contains("(**missed**: 0.50)"));
        assert!(judge(&promises(&figures())).is_ok());
        missed.snapshot_instructions.insert(12_288, 4601);
        assert!(judge(&promises(&missed)).unwrap_err().to_string().contains("depends on the size"));
        missed.kept.after.fixed_bytes += 1;
        assert!(judge(&promises(&missed)).unwrap_err().to_string().contains("leave memory behind"));
    }

    #[test]
    fn the_part_is_put_in_the_place_of_the_old_one() {
        let section = format!("{HEADING}\n\nnew\n");
        let page = format!("# All\n\n## One\n\n1\n\n{HEADING}\n\nold\n\n### Sub\n\nold\n\n## Two\n\n2\n");
        let expected = format!("# All\n\n## One\n\n1\n\n{HEADING}\n\nnew\n\n## Two\n\n2\n");
        assert_eq!(replace_section(&page, HEADING, &section), expected);
        assert_eq!(replace_section(&expected, HEADING, &section), expected);
        assert_eq!(
            replace_section("# All\n\n1\n", HEADING, &section),
            format!("# All\n\n1\n\n{HEADING}\n\nnew\n")
        );
    }
}
