//! The cost of slots on a bare machine: a small kernel with and without slots, on a machine that
//! counts instructions.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;

use super::{
    hosted::{self, Hosted},
    stats::{self, Ratio},
    suite::{self, Amount},
};
use mercury_lab::{
    error::{Error, Result},
    image::Release,
    live::{self, Line},
    machine::Machine,
    markdown::{table, thousands},
    previrtualization::{self, Built, Flavour},
    spec::{Icount, Spec},
};

/// The heading of this section in docs/benchmarks.md.
pub const HEADING: &str = "## Pre-virtualization";
/// The section's key in docs/benchmarks.json.
pub const KEY: &str = "previrtualization";

/// Upper bound that the project promises for instructions, and for the time of all benchmarks
/// together.
const AT_MOST: f64 = 1.01;
/// Upper bound for the size of code.
const CODE_AT_MOST: f64 = 1.02;

/// The number of boots of each kernel. The place of data and the time of the scheduler's calls
/// differ by chance.
const ROUNDS: u32 = 5;

/// The number of measurements of time on each of two machines that exist at the same time.
const TURNS: u32 = 4;

/// The amount of each benchmark when it is timed, on one CPU.
const AMOUNT_TIMED: Amount = Amount { parallel: 1, dbench_seconds: 2, ..Amount::TIMED };

/// The name of the geometric mean of a pair's ratios of time. One of sixteen intervals may well be
/// beyond a bound by chance.
const TOGETHER: &str = "all together";

/// The command that reads all programs into memory. A page fault maps the neighbouring pages of the
/// file that are in memory. exec takes two per cent more where reading ahead has not brought in
/// everything.
const WARM: &str = "cat /mercury/bin/* /bin/sh /bin/true /lib64/ld-linux-x86-64.so.2 \
                    /lib/x86_64-linux-gnu/lib*.so* >/dev/null 2>&1 || true";

/// The benchmarks, by the names of `mercury bench os` and of the applications.
const BENCHMARKS: &[&str] = &[
    "null-call",
    "fork",
    "exec",
    "sh",
    "pipe",
    "ctx-2p-0k",
    "ctx-16p-16k",
    "ctx-16p-64k",
    "mmap",
    "protection-fault",
    "page-fault",
    "postgres-read",
    "dbench",
    "build",
    "iperf3-loopback",
    "ping-loopback",
];

/// The amount of measurements.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Samples of each benchmark of lmbench.
    pub samples: u32,
    /// Pairs of machines on which the time of both kernels is measured; none if the clock is to be
    /// left alone.
    pub timed_pairs: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct Previrtualization {
    /// The figures of [`hosted::headlines`] for a hosted kernel.
    #[serde(flatten)]
    pub headlines: BTreeMap<String, f64>,
    /// Sensitive instructions without a record, over all kernels and modules.
    pub uncovered: u64,
    /// The worst ratio of instructions, over all kernels and benchmarks.
    pub padded_over_unpadded: f64,
    pub kernels: Vec<Compared>,
    /// The comparison of a hosted kernel with the systems like it; `None` if it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosted: Option<Hosted>,
}

/// One kernel, with and without slots.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// The version that `uname -r` prints.
    pub kernel: String,
    pub sensitive: u64,
    /// Sensitive instructions without a record.
    pub uncovered: u64,
    pub slots: u64,
    /// Slots that need no NOP.
    pub slots_without_nop: u64,
    /// Bytes of code, padded ÷ unpadded.
    pub code_over_unpadded: f64,
    pub instructions: BTreeMap<String, Instructions>,
    /// Time, padded ÷ unpadded, by benchmark.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub time: BTreeMap<String, Ratio>,
}

/// Instructions of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Instructions {
    /// Instructions of the kernel without slots.
    pub unpadded: f64,
    /// Instructions of the pre-virtualized kernel.
    pub padded: f64,
    pub ratio: f64,
}

impl Instructions {
    fn new(unpadded: f64, padded: f64) -> Self {
        let rounded = |number: f64, to: f64| (number * to).round() / to;
        let [unpadded, padded] = [unpadded, padded].map(|number| rounded(number, 10.0));
        Self { unpadded, padded, ratio: rounded(padded / unpadded, 1e4) }
    }
}

/// Measures the kernels of `releases`.
///
/// # Errors
/// If a kernel does not build, or a machine fails.
pub fn measure(releases: &[Release], effort: Effort, rounds: hosted::Rounds) -> Result<Previrtualization> {
    let hosted = hosted::measure(Release::Bookworm, rounds)?;
    Ok(bare(releases, effort)?.with(hosted))
}

/// Measures the kernels on bare machines only.
///
/// # Errors
/// As for [`measure`].
pub fn bare(releases: &[Release], effort: Effort) -> Result<Previrtualization> {
    let kernels = releases.iter().map(|release| compare(*release, effort)).collect::<Result<Vec<_>>>()?;
    Ok(Previrtualization::of(kernels))
}

impl Previrtualization {
    /// Returns the figures of kernels that have been measured.
    #[must_use]
    pub fn of(kernels: Vec<Compared>) -> Self {
        let ratios = kernels.iter().flat_map(|kernel| kernel.instructions.values()).map(|one| one.ratio);
        Self {
            headlines: BTreeMap::new(),
            uncovered: kernels.iter().map(|kernel| kernel.uncovered).sum(),
            padded_over_unpadded: ratios.fold(0.0, f64::max),
            kernels,
            hosted: None,
        }
    }

    /// Returns the figures with those of a hosted kernel.
    #[must_use]
    pub fn with(self, hosted: Hosted) -> Self {
        Self { headlines: hosted::headlines(&hosted).into_iter().collect(), hosted: Some(hosted), ..self }
    }
}

/// Builds a release's kernel both ways, accounts for the padded one, and counts on both.
///
/// # Errors
/// As for [`measure`].
pub fn compare(release: Release, effort: Effort) -> Result<Compared> {
    let plain = previrtualization::build(release, Flavour::Plain)?;
    let padded = previrtualization::build(release, Flavour::PreVirtualized)?;
    let account = previrtualization::account(&padded)?;
    live::say(&format!("{release}'s kernel, as it is and pre-virtualized, on one CPU"));
    let (mut kernel, mut unpadded, mut with_slots) = (String::new(), BTreeMap::new(), BTreeMap::new());
    for _ in 0..ROUNDS {
        kernel = count(release, &plain, effort.samples, &mut unpadded)?;
        count(release, &padded, effort.samples, &mut with_slots)?;
    }
    let time = match effort.timed_pairs {
        0 => BTreeMap::new(),
        pairs => time(release, [&plain, &padded], pairs)?,
    };
    let both =
        |name: &str| Some((name.to_owned(), Instructions::new(*unpadded.get(name)?, *with_slots.get(name)?)));
    let number = |key: &str| account[key].as_u64().unwrap_or(0);
    let files = account["files"].as_array().into_iter().flatten();
    let sum = |key: &str| files.clone().filter_map(|file| file[key].as_u64()).sum();
    Ok(Compared {
        kernel,
        sensitive: number("sensitive"),
        uncovered: number("uncovered"),
        slots: sum("slots"),
        slots_without_nop: sum("without_nop"),
        code_over_unpadded: code_bytes(&padded.vmlinux)? / code_bytes(&plain.vmlinux)?,
        instructions: BENCHMARKS.iter().filter_map(|name| both(name)).collect(),
        time,
    })
}

/// Times both kernels, without and with slots. Each pair of machines that exist at the same time
/// gives one ratio. The place of an emulator's translated code makes one machine faster than its
/// equal for as long as it exists.
fn time(release: Release, kernels: [&Built; 2], pairs: u32) -> Result<BTreeMap<String, Ratio>> {
    let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut line = Line::begin();
    for pair in 0..pairs {
        line.show(&format!("time, machines {} of {pairs}", pair + 1));
        let [unpadded, padded] = time_pair(release, kernels, pair)?;
        let of = |(name, cost): (String, f64)| unpadded.get(&name).map(|without| (name, cost / without));
        let pair: BTreeMap<String, f64> = padded.into_iter().filter_map(of).collect();
        let together = pair.values().map(|ratio| ratio.ln()).sum::<f64>() / pair.len() as f64;
        for (name, ratio) in pair.into_iter().chain([(TOGETHER.to_owned(), together.exp())]) {
            ratios.entry(name).or_default().push(ratio);
        }
    }
    Ok(ratios.into_iter().map(|(name, ratios)| (name, Ratio::of(&ratios))).collect())
}

/// Times each benchmark on both kernels: the median of several turns, on two machines by turns,
/// each as often first.
fn time_pair(release: Release, kernels: [&Built; 2], pair: u32) -> Result<[BTreeMap<String, f64>; 2]> {
    let boot = |built: &Built| {
        let machine = Machine::boot(machine(release, &built.image))?;
        machine.sh(WARM)?;
        suite::set_up(&machine)?;
        suite::measure(&machine, &AMOUNT_TIMED)?;
        Ok(machine)
    };
    let machines = [boot(kernels[0])?, boot(kernels[1])?];
    let mut costs: [BTreeMap<String, Vec<f64>>; 2] = Default::default();
    for turn in 0..2 * TURNS {
        let which = ((pair + turn / 2 + turn) % 2) as usize;
        for (name, cost) in suite::measure(&machines[which], &AMOUNT_TIMED)? {
            costs[which].entry(name).or_default().push(cost);
        }
    }
    machines.into_iter().try_for_each(Machine::shut_down)?;
    Ok(costs.map(|costs| costs.into_iter().map(|(name, costs)| (name, stats::median(&costs))).collect()))
}

/// Boots a machine, and keeps the lowest cost of each benchmark. Returns the kernel's version.
fn count(
    release: Release,
    built: &Built,
    samples: u32,
    lowest: &mut BTreeMap<String, f64>,
) -> Result<String> {
    let machine = Machine::boot(machine(release, &built.image).icount(Icount::Exact))?;
    machine.sh(WARM)?;
    suite::set_up(&machine)?;
    let amount = Amount { samples, ..Amount::COUNTED };
    // The first pass differs from the second: it reads from the disk.
    for _ in 0..2 {
        for (name, cost) in suite::measure(&machine, &amount)? {
            lowest.entry(name).and_modify(|lowest| *lowest = lowest.min(cost)).or_insert(cost);
        }
    }
    let kernel = machine.kernel().to_owned();
    machine.shut_down()?;
    Ok(kernel)
}

/// Returns the machine on which a small kernel is counted. Everything lies at the same place in
/// each run.
#[must_use]
pub fn machine(release: Release, image: &Path) -> Spec {
    let spec = Spec::new(previrtualization::kernel_of(release)).cpus(1).memory_mib(1024).own_kernel(image);
    spec.kernel_arg("nokaslr").kernel_arg("norandmaps")
}

fn code_bytes(vmlinux: &Path) -> Result<f64> {
    use object::{Object, ObjectSection, SectionKind};
    let what =
        |error: &dyn std::fmt::Display| Error::Host(format!("cannot read {}: {error}", vmlinux.display()));
    let bytes = std::fs::read(vmlinux).map_err(|error| what(&error))?;
    let file = object::File::parse(&*bytes).map_err(|error| what(&error))?;
    let code = file.sections().filter(|section| section.kind() == SectionKind::Text);
    Ok(code.map(|section| section.size()).sum::<u64>() as f64)
}

/// Returns the promises that the figures break.
#[must_use]
pub fn broken(figures: &Previrtualization) -> Vec<String> {
    figures.kernels.iter().flat_map(Compared::broken).collect()
}

/// Checks the promises.
///
/// # Errors
/// If a promise is broken.
pub fn verdict(figures: &Previrtualization) -> Result<()> {
    let broken = broken(figures);
    if broken.is_empty() { Ok(()) } else { Err(Error::Unhealthy(broken.join("; "))) }
}

impl Compared {
    fn broken(&self) -> Vec<String> {
        let checks = [
            (self.uncovered > 0, format!("{} sensitive instructions are uncovered", self.uncovered)),
            (
                self.code_over_unpadded > CODE_AT_MOST,
                format!("code is {:.4} times as long", self.code_over_unpadded),
            ),
            (self.instructions.len() < BENCHMARKS.len(), "a benchmark is missing".to_owned()),
        ];
        let slow = |(name, one): (&String, &Instructions)| {
            (one.ratio > AT_MOST, format!("{name} takes {} times the instructions", one.ratio))
        };
        let late = |(name, one): (&String, &Ratio)| {
            (one.median > AT_MOST, format!("{name} takes {:.4} times the time", one.median))
        };
        let all = checks
            .into_iter()
            .chain(self.instructions.iter().map(slow))
            .chain(self.time.get_key_value(TOGETHER).map(late));
        all.filter(|(broken, _)| *broken).map(|(_, what)| format!("{}: {what}", self.kernel)).collect()
    }
}

/// Returns this section of docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Previrtualization) -> String {
    let hosted = figures.hosted.iter().map(hosted::section);
    let parts: Vec<String> = figures.kernels.iter().map(kernel_section).chain(hosted).collect();
    format!(
        "{HEADING}\n\n\
        A small kernel with and without the slots of `afterburner make`, \
        on a machine with one CPU that counts\n\
        instructions (the lowest of {ROUNDS} boots of each): [previrtualization.md](previrtualization.md). \
        The\n\
        promises:\n\n\
        - No sensitive instruction is uncovered.\n\
        - Each benchmark takes at most {AT_MOST} times the instructions.\n\
        - The code is at most {CODE_AT_MOST} times as large.\n\
        - All benchmarks together take at most {AT_MOST} times the time.\n\n\
        The time is that of an emulator on a shared host. Both kernels run on two machines at the same time. \
        The\n\
        figures are medians of {TURNS} turns of each, and medians over several such pairs, \
        with their 95 % intervals.\n\n{}",
        parts.join("\n")
    )
}

/// Returns a page's section, with another part for hosted kernels.
#[must_use]
pub fn with_hosted(page: &str, hosted: &str) -> String {
    let section = page.find(&format!("{HEADING}\n")).map_or(HEADING, |at| &page[at..]);
    let section = section.find("\n## ").map_or(section, |next| &section[..next]);
    let others = section.find(&format!("\n{}\n", hosted::HEADING)).map_or(section, |at| &section[..at]);
    format!("{}\n\n{hosted}", others.trim_end())
}

/// Returns the section with other kernels on bare machines, and with the page's part for hosted
/// kernels.
#[must_use]
pub fn with_kernels(page: &str, section: &str) -> String {
    let old = page.find(&format!("{HEADING}\n")).map_or("", |at| &page[at..]);
    let old = old[1.min(old.len())..].find("\n## ").map_or(old, |next| &old[..=next]);
    let hosted = old.find(&format!("\n{}\n", hosted::HEADING)).map_or("", |at| old[at..].trim());
    if hosted.is_empty() { section.to_owned() } else { format!("{}\n\n{hosted}\n", section.trim_end()) }
}

/// Returns the figures of other kernels on bare machines as JSON.
///
/// # Errors
/// If the figures cannot be written as JSON.
pub fn json_with_kernels(old: &str, kernels: &Previrtualization) -> Result<String> {
    let keys = hosted::headline_keys();
    let is_headline = |line: &&str| keys.iter().any(|key| line.starts_with(&format!("  \"{key}\":")));
    let headlines: String = old.lines().filter(is_headline).map(|line| format!("\n{line}")).collect();
    let text = super::pretty(kernels)?.replacen('{', &format!("{{{headlines}"), 1);
    let hosted = super::alone_of(old, "hosted");
    Ok(hosted.map_or(text.clone(), |hosted| super::with_part(&text, "hosted", &hosted)).trim_end().to_owned())
}

/// Returns the figures with others of hosted kernels as JSON.
///
/// # Errors
/// If the figures cannot be written as JSON.
pub fn json_with_hosted(figures: &str, hosted: &Hosted) -> Result<String> {
    let keys = hosted::headline_keys();
    let is_headline = |line: &str| keys.iter().any(|key| line.starts_with(&format!("  \"{key}\":")));
    let others: Vec<&str> = figures.lines().filter(|line| !is_headline(line)).collect();
    let with = super::with_part(&others.join("\n"), "hosted", &super::pretty(hosted)?);
    let headlines: BTreeMap<String, f64> = hosted::headlines(hosted).into_iter().collect();
    let first: String = headlines.iter().map(|(key, number)| format!("\n  \"{key}\": {number:?},")).collect();
    Ok(with.replacen('{', &format!("{{{first}"), 1).trim_end().to_owned())
}

fn kernel_section(kernel: &Compared) -> String {
    let median = |time: &Ratio| format!("{:.3}", time.median);
    let interval = |time: &Ratio| format!("{:.3} – {:.3}", time.low, time.high);
    let row = |(name, one): (&String, &Instructions)| {
        let count = |number: f64| thousands(number.round() as u64);
        let time = kernel.time.get(name).map_or_else(Vec::new, |time| vec![median(time), interval(time)]);
        let counts = [name.clone(), count(one.unpadded), count(one.padded), format!("{:.4}", one.ratio)];
        counts.into_iter().chain(time).collect()
    };
    let mut rows: Vec<Vec<String>> = kernel.instructions.iter().map(row).collect();
    if let Some(time) = kernel.time.get(TOGETHER) {
        let [none, name] = [String::new(), TOGETHER.to_owned()];
        rows.push(vec![name, none.clone(), none.clone(), none, median(time), interval(time)]);
    }
    let mut headings = vec!["instructions", "as it is", "pre-virtualized", "ratio"];
    if !kernel.time.is_empty() {
        headings.extend(["time, ratio", "95 %"]);
    }
    format!(
        "{}: {} sensitive instructions, **{} uncovered**, in {} slots, {} of which need no NOP; \
         code {:+.2} %.\n\n{}",
        kernel.kernel,
        thousands(kernel.sensitive),
        kernel.uncovered,
        thousands(kernel.slots),
        thousands(kernel.slots_without_nop),
        (kernel.code_over_unpadded - 1.0) * 100.0,
        table(&headings, &rows)
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
/// Figures for the tests of other modules.
pub mod tests {
    use serde_json::Value;

    use super::*;

    /// Returns the figures of a kernel that keeps all promises.
    #[must_use]
    pub fn figures() -> Previrtualization {
        let instructions =
            BENCHMARKS.iter().map(|name| ((*name).to_owned(), Instructions::new(1000.0, 1009.0))).collect();
        let kernel = Compared {
            kernel: "6.1.0-small".into(),
            sensitive: 5000,
            uncovered: 0,
            slots: 4000,
            slots_without_nop: 3000,
            code_over_unpadded: 1.005,
            instructions,
            time: BTreeMap::from([
                ("fork".to_owned(), Ratio { median: 1.013, low: 1.011, high: 1.02 }),
                (TOGETHER.to_owned(), Ratio { median: 1.003, low: 0.991, high: 1.02 }),
            ]),
        };
        Previrtualization::of(vec![kernel]).with(hosted::tests::figures())
    }

    #[test]
    fn the_section_has_all_figures() {
        let section = section(&figures());
        for part in [
            "**0 uncovered**",
            "4,000 slots, 3,000 of which",
            "code +0.50 %",
            "1.0090",
            "0.991 – 1.020",
            "### Hosted",
        ] {
            assert!(section.contains(part), "{part}: {section}");
        }
    }

    #[test]
    fn the_part_for_hosted_kernels_is_replaced_alone() {
        let page = format!("# Page\n\n{}\n## Next\n\nText\n", section(&figures()));
        let replaced = with_hosted(&page, "### Hosted\n\nNew\n");
        assert!(replaced.starts_with(HEADING) && replaced.ends_with("\n\n### Hosted\n\nNew\n"), "{replaced}");
        assert!(
            replaced.contains("1.0090")
                && !replaced.contains("User Mode Linux (UML)")
                && !replaced.contains("Next")
        );
        assert_eq!(with_hosted("", "New"), format!("{HEADING}\n\nNew"));
    }

    #[test]
    fn the_figures_of_hosted_kernels_are_replaced_alone() {
        let before = super::super::pretty(&figures()).unwrap();
        let again = json_with_hosted(&before, &hosted::tests::figures()).unwrap();
        assert_eq!(again, before);
        let mut other = hosted::tests::figures();
        for row in &mut other.benchmarks {
            row.ways.remove("uml_seccomp");
            row.ways.insert("uml", 900.0);
        }
        let replaced = json_with_hosted(&before, &other).unwrap();
        let parsed: Value = serde_json::from_str(&replaced).unwrap();
        assert_eq!(parsed["hosted_null_syscall_vs_uml"], 450.0);
        assert_eq!(parsed["uncovered"], 0);
        assert!(parsed["kernels"].is_array() && parsed.get("hosted_null_syscall_vs_uml_seccomp").is_none());
        let first: Value = serde_json::from_str(&json_with_hosted("{}", &other).unwrap()).unwrap();
        assert_eq!(first["build_over_native"], 2.0);
        assert_eq!(first["hosted"]["benchmarks"][0]["uml"], 900.0);
    }

    #[test]
    fn kernels_on_bare_machines_are_replaced_alone() {
        let page = format!("# Page\n\n{}\n## Next\n\nText\n", section(&figures()));
        let again = with_kernels(&page, &section(&Previrtualization { hosted: None, ..figures() }));
        assert_eq!(again.trim_end(), section(&figures()).trim_end());
        assert_eq!(with_kernels("# Page\n", "New"), "New");
        let before = super::super::pretty(&figures()).unwrap();
        let mut other = Previrtualization { hosted: None, headlines: BTreeMap::new(), ..figures() };
        assert_eq!(json_with_kernels(&before, &other).unwrap(), before);
        other.uncovered = 7;
        let replaced: Value = serde_json::from_str(&json_with_kernels(&before, &other).unwrap()).unwrap();
        assert_eq!(replaced["uncovered"], 7);
        assert!(replaced["hosted"]["benchmarks"].is_array() && replaced["build_over_native"].is_number());
        let first: Value = serde_json::from_str(&json_with_kernels("{}", &other).unwrap()).unwrap();
        assert!(first["kernels"].is_array() && first.get("hosted").is_none());
    }

    #[test]
    fn each_broken_promise_is_named() {
        let broken = |change: fn(&mut Compared)| {
            let mut figures = figures();
            change(&mut figures.kernels[0]);
            verdict(&figures).unwrap_err().to_string()
        };
        assert!(verdict(&figures()).is_ok());
        assert!(broken(|kernel| kernel.uncovered = 1).contains("1 sensitive instructions are uncovered"));
        assert!(broken(|kernel| kernel.code_over_unpadded = 1.021).contains("1.0210 times as long"));
        assert!(broken(|kernel| assert!(kernel.instructions.remove("fork").is_some())).contains("missing"));
        let slow = |kernel: &mut Compared| {
            kernel.instructions.insert("fork".into(), Instructions::new(1000.0, 1011.0));
        };
        assert!(broken(slow).contains("fork takes 1.011"));
        let late = |kernel: &mut Compared| {
            kernel.time.insert(TOGETHER.into(), Ratio { median: 1.02, low: 0.99, high: 1.08 });
        };
        assert!(broken(late).contains("all together takes 1.0200 times the time"));
    }
}
