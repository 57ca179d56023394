//! `lab bench papers`: the tables of both papers beside the same measurements in the lab, with the
//! cost of a hypervisor that is always there.
//!
//! One machine that counts instructions runs the same suite natively, with Mercury loaded, and
//! attached. Then a virtual machine of stock KVM runs the suite, natively hosted and above Mercury.
//! These are the papers' columns N-L, M-N, M-V, X-U and M-U, with KVM in place of Xen. X-0, domain
//! 0 of Xen, has no counterpart: the host of KVM is native.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::Value;

use super::{
    Depth,
    counts::{counting_machine, unexpected},
    hosted::work_disk,
    stats::{self, rounded},
    suite::{dbench_operations, word_after},
};
use mercury_lab::{
    command::patient,
    error::{Context, Error, Result},
    guests,
    image::Release,
    live::{self, Line},
    machine::Machine,
    markdown::{table, thousands},
    paths,
    spec::{Bus, Qemu},
};

/// The heading of this part's section in docs/benchmarks.md.
pub const HEADING: &str = "## The papers' tables, and a hypervisor that is always there";
/// This part's key in docs/benchmarks.json.
pub const KEY: &str = "papers";

const MEMORY_MIB: u32 = 3072;
const GUEST_MEMORY_MIB: u32 = 1024;
/// Size of the disk for dbench's file system.
const DISK_MIB: u32 = 1024;
/// Time limit of one pass, in wall time.
const LIMIT: Duration = Duration::from_secs(3600);

/// Time limit of one benchmark in a virtual machine, in wall time on a free host. None takes half of it.
const GUEST_LIMIT: Duration = Duration::from_secs(240);
/// The end of the suite's output.
const END: &str = "== end";

const FILES: [(&str, &str); 3] = [
    ("set-up", include_str!("../../guest/papers/set-up")),
    ("suite", include_str!("../../guest/papers/suite")),
    ("guest", include_str!("../../guest/papers/guest")),
];

/// The amount of each benchmark.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Passes in each column.
    pub rounds: u32,
    /// Samples of each operation of `mercury bench os`.
    pub samples: u32,
    /// Transactions of pgbench.
    pub transactions: u32,
    /// Seconds of dbench.
    pub dbench_seconds: u32,
    /// MiB that iperf3 sends by TCP, and as many by UDP.
    pub iperf_mib: u32,
    /// The part of a kernel that is built.
    pub part: &'static str,
}

impl Plan {
    /// The amount for docs/.
    pub const FULL: Self = Self {
        rounds: 3,
        samples: 3,
        transactions: 200,
        dbench_seconds: 2,
        iperf_mib: 30,
        part: "kernel/dma/",
    };
    /// The amount of a quick run.
    pub const QUICK: Self = Self {
        rounds: 1,
        samples: 1,
        transactions: 50,
        dbench_seconds: 1,
        iperf_mib: 10,
        part: "kernel/time/timekeeping.o",
    };

    /// Returns the amount for a run.
    #[must_use]
    pub fn of(depth: Depth) -> Self {
        if depth == Depth::Full { Self::FULL } else { Self::QUICK }
    }

    /// Returns the arguments of the suite.
    fn words(&self) -> String {
        let Self { samples, transactions, dbench_seconds, iperf_mib, part, .. } = self;
        format!("{samples} {transactions} {dbench_seconds} {iperf_mib} {part}")
    }
}

/// A column of the papers' tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    NativeLinux,
    MercuryNative,
    MercuryAttached,
    Guest,
    GuestAboveMercury,
}

impl Column {
    const HOST: [Self; 3] = [Self::NativeLinux, Self::MercuryNative, Self::MercuryAttached];
    const GUEST: [Self; 2] = [Self::Guest, Self::GuestAboveMercury];
    /// The columns that are ratios to the first one.
    const COMPARED: [Self; 4] =
        [Self::MercuryNative, Self::MercuryAttached, Self::Guest, Self::GuestAboveMercury];

    /// Returns the papers' name.
    fn name(self) -> &'static str {
        match self {
            Self::NativeLinux => "N-L",
            Self::MercuryNative => "M-N",
            Self::MercuryAttached => "M-V",
            Self::Guest => "X-U",
            Self::GuestAboveMercury => "M-U",
        }
    }

    /// Returns the command that leads to this column's state from any other.
    fn command(self) -> &'static str {
        match self {
            Self::NativeLinux | Self::Guest => "unload --detach",
            Self::MercuryNative => "load",
            Self::MercuryAttached | Self::GuestAboveMercury => "attach",
        }
    }

    /// Returns the state that `mercury status` then has.
    fn state(self) -> &'static str {
        match self {
            Self::NativeLinux | Self::Guest => "no-driver",
            Self::MercuryNative => "loaded",
            Self::MercuryAttached | Self::GuestAboveMercury => "attached",
        }
    }

    /// Returns the key in the JSON of `mercury bench os`.
    fn key(self) -> &'static str {
        match self {
            Self::NativeLinux => "native_us",
            Self::MercuryNative => "mercury_native_us",
            Self::MercuryAttached => "mercury_attached_us",
            Self::Guest => "xen_domain_u_us",
            Self::GuestAboveMercury => "mercury_domain_u_us",
        }
    }
}

/// Costs by benchmark.
type Costs = BTreeMap<String, f64>;

/// One benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub name: String,
    /// The operation whose cost was measured.
    pub operation: &'static str,
    /// Median of N-L, in instructions.
    #[serde(serialize_with = "rounded")]
    pub native_instructions: f64,
    /// Medians divided by that of N-L, by column.
    pub over_native: BTreeMap<&'static str, f64>,
    /// The largest difference between a pass of N-L and the median.
    #[serde(serialize_with = "rounded")]
    pub noise: f64,
    /// The same ratios from CLUSTER 2007, table 1. Empty if the table lacks the benchmark.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cluster_2007: BTreeMap<&'static str, f64>,
    /// The same ratios from JCST 2012, table 1.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub jcst_2012: BTreeMap<&'static str, f64>,
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Papers {
    /// The run was a quick one.
    pub is_quick: bool,
    pub machine: String,
    pub kernel: String,
    /// Passes in each column.
    pub rounds: u32,
    /// The part of a kernel that was built.
    pub part: String,
    /// The benchmarks, in the order of the suite.
    pub benchmarks: Vec<Measured>,
}

/// Measures all columns.
///
/// # Errors
/// If a machine or a benchmark fails.
pub fn measure(plan: Plan) -> Result<Papers> {
    let disk = work_disk(Release::Bookworm)?.to_string_lossy().replace(',', ",,");
    live::say("The papers' benchmarks in instructions: natively, attached, and in a guest of KVM's");
    let spec = counting_machine(MEMORY_MIB).qemu_version(Qemu::Newer).disk(Bus::Nvme, DISK_MIB);
    let spec = spec.kernel_arg("norandmaps").qemu_arg("-drive");
    let spec = spec.qemu_arg(&format!("if=none,id=work,file={disk},format=raw,read-only=on"));
    let spec = spec.qemu_arg("-device").qemu_arg("virtio-blk-pci,drive=work");
    let spec = guests::arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word));
    let spec = cable().iter().fold(spec, |spec, word| spec.qemu_arg(word));
    let summary = spec.summary();
    let machine = Machine::boot(spec)?;
    let kernel = machine.kernel().to_owned();
    set_up(&machine)?;
    let mut passes: Vec<(Column, Costs)> = Vec::new();
    let mut line = Line::begin();
    let mut os = Value::Null;
    let suite = |plan: &Plan| -> Result<Pass> {
        let command = format!("/root/papers/suite {}", plan.words());
        read(&machine.command(&command).timeout(LIMIT).run()?.check()?.stdout, plan)
    };
    line.show("a pass to warm up");
    suite(&Plan::QUICK)?;
    for (round, column) in rounds(plan, &Column::HOST) {
        begin(&machine, column)?;
        line.show(&format!("round {round}: {}", column.name()));
        let Pass { costs, report } = suite(&plan)?;
        passes.push((column, costs));
        os = report;
        keep(&passes)?;
    }
    leave_disks(&machine)?;
    for (round, column) in rounds(plan, &Column::GUEST) {
        begin(&machine, column)?;
        let mut show = |part: &str| line.show(&format!("round {round}: {}: {part}", column.name()));
        let Pass { costs, .. } = guest_pass(&machine, &plan, &mut show)?;
        passes.push((column, costs));
        keep(&passes)?;
    }
    machine.check_health()?;
    machine.shut_down()?;
    Ok(Papers {
        is_quick: plan.rounds == Plan::QUICK.rounds,
        machine: summary,
        kernel,
        rounds: plan.rounds,
        part: plan.part.to_owned(),
        benchmarks: summarize(&passes, &os),
    })
}

/// Keeps the figures of a run that may not end.
fn keep(passes: &[(Column, Costs)]) -> Result<()> {
    let all: Vec<_> = passes.iter().map(|(column, costs)| (column.name(), costs)).collect();
    let text = serde_json::to_string(&all).map_err(|error| Error::Host(error.to_string()))?;
    let path = paths::lab_dir("bench")?.join("papers-so-far.json");
    std::fs::write(&path, text).context(|| format!("write {}", path.display()))
}

/// Returns the emulator's arguments for two network cards on one cable.
fn cable() -> [String; 8] {
    let card = |number: u32| {
        [
            "-netdev".to_owned(),
            format!("hubport,id=card{number},hubid=1"),
            "-device".to_owned(),
            format!("virtio-net-pci,netdev=card{number},romfile=,mac=52:54:00:77:01:0{number}"),
        ]
    };
    let [[a, b, c, d], [e, f, g, h]] = [card(1), card(2)];
    [a, b, c, d, e, f, g, h]
}

fn set_up(machine: &Machine) -> Result<()> {
    machine.sh("mkdir -p /root/papers /run/guests")?;
    for (name, text) in FILES {
        machine.put(&format!("/root/papers/{name}"), text.as_bytes(), 0o755)?;
    }
    // The virtual machine's memory is in huge pages of its own: the kernel then moves no page beneath it.
    machine.sh(&format!(
        "echo {0} > /proc/sys/vm/nr_hugepages && test $(cat /proc/sys/vm/nr_hugepages) = {0} && \
         mkdir -p /run/huge && mount -t hugetlbfs hugetlbfs /run/huge",
        GUEST_MEMORY_MIB / 2
    ))?;
    // The spare disk is known by its serial number. A host that polls before it halts would execute
    // instructions for as long as nothing happens.
    machine.sh(
        "spare=$(dirname $(dirname $(grep -l mercury-disk0 /sys/block/nvme*n1/device/serial))) && \
         mkfs.ext4 -q -L papers /dev/${spare##*/} && modprobe virtio_blk && \
         modprobe kvm_amd && echo 0 > /sys/module/kvm/parameters/halt_poll_ns && \
         mount -o ro $(blkid -L mercury-guests) /run/guests",
    )?;
    machine.command("/root/papers/set-up").timeout(LIMIT).run()?.check().map(drop)
}

/// Returns the columns of each round.
fn rounds(plan: Plan, columns: &[Column]) -> impl Iterator<Item = (u32, Column)> {
    (1..=plan.rounds).flat_map(|round| columns.iter().map(move |column| (round, *column)))
}

/// Brings the machine into a column's state.
fn begin(machine: &Machine, column: Column) -> Result<()> {
    machine.mercury(column.command())?;
    check_state(machine, column)
}

/// Has the machine let go of the disks.
fn leave_disks(machine: &Machine) -> Result<()> {
    let line = "lab-postgres stop && \
                umount /run/papers/disk /run/papers/work/tmp /run/papers/work/proc /run/papers/work/dev && \
                umount /run/papers/work && sync && mount -o remount,ro /";
    machine.command(line).timeout(LIMIT).run()?.check().map(drop)
}

/// Runs all benchmarks in a virtual machine, and shows which one is at work. Each runs twice: to warm up, and
/// to be measured.
fn guest_pass(machine: &Machine, plan: &Plan, show: &mut dyn FnMut(&str)) -> Result<Pass> {
    show("a virtual machine starts");
    let mut guest = machine.spawn(&format!("exec /root/papers/guest {GUEST_MEMORY_MIB}"))?;
    guest.wait_output("ready", patient(GUEST_LIMIT))?;
    let mut said = String::new();
    for name in ["os"].into_iter().chain(APPLICATIONS.map(|(name, ..)| name)) {
        show(name);
        let mut before = String::new();
        for plan in [&Plan::QUICK, plan] {
            before = guest.output_so_far()?;
            guest.write_stdin(format!("{} {name}\n", plan.words()).as_bytes())?;
            guest.wait_output_times(END, before.matches(END).count() + 1, patient(GUEST_LIMIT))?;
        }
        said.push_str(guest.output_so_far()?.get(before.len()..).unwrap_or_default());
    }
    guest.write_stdin(b"\n")?;
    guest.wait(LIMIT)?.check()?;
    read(&said, plan)
}

fn check_state(machine: &Machine, column: Column) -> Result<()> {
    let status = machine.mercury("status")?;
    if status["state"] == column.state() {
        return Ok(());
    }
    Err(machine.blame(Error::Unhealthy(format!("{} instead of {}", status["state"], column.state()))))
}

/// One pass of the suite.
#[derive(Clone, Debug)]
struct Pass {
    costs: Costs,
    /// The output of `mercury bench os`.
    report: Value,
}

/// The benchmarks besides those of `mercury bench os`: names, operations, and the words of each paper
/// about domain U, as costs. Their text has losses of performance: a loss of 30 % is a cost of 1 / 0.7.
const APPLICATIONS: [(&str, &str, &str, &str); 6] = [
    ("postgres-read", "transaction (pgbench -S)", "1.25 (OSDB-IR)", "1.25 (OSDB-IR)"),
    ("dbench-disk", "operation (NVMe)", "1.43", "0.95"),
    ("build-kernel", "build", "1.08 (whole kernel)", "1.10 (whole kernel)"),
    ("iperf3-tcp", "MiB", "", "3.33"),
    ("iperf3-udp", "MiB", "", "3.33"),
    ("ping", "echo", "", "2.50"),
];

const PINGS: f64 = 1000.0;

/// Reads the output of the suite.
fn read(said: &str, plan: &Plan) -> Result<Pass> {
    let part = |name: &str| {
        let part = said.split_once(&format!("== {name}")).map_or("", |(_, rest)| rest);
        part.split_once("\n== ").map_or(part, |(part, _)| part).trim_start_matches(['\r', '\n'])
    };
    let wrong = |name: &str| Error::Host(format!("{name} printed an unexpected result: {}", part(name)));
    let json = |name: &str| {
        let text = part(name).trim_end_matches(|c: char| c != '}');
        serde_json::from_str::<Value>(text).map_err(|_| wrong(name))
    };
    let report = json("os")?;
    let mut costs = Costs::new();
    let operations = report["benchmarks"].as_array().ok_or_else(|| unexpected("bench os", &report))?;
    for benchmark in operations {
        let name = benchmark["name"].as_str().ok_or_else(|| unexpected("bench os", &report))?;
        let us = benchmark["us"]["median"].as_f64().ok_or_else(|| unexpected("bench os", &report))?;
        costs.insert(name.to_owned(), us * 1e3);
    }
    for (name, ..) in APPLICATIONS {
        let cost = match name {
            "postgres-read" => word_after(part(name), "tps = ").map(|tps| 1e9 / tps),
            "dbench-disk" => match dbench_operations(&part(name).replace('\r', "")) {
                0 => None,
                operations => Some(f64::from(plan.dbench_seconds) * 1e9 / operations as f64),
            },
            "iperf3-tcp" | "iperf3-udp" => iperf_cost(&json(name)?),
            "ping" => word_after(part(name), "elapsed_us ").map(|us| us * 1e3 / PINGS),
            _ => word_after(part(name), "elapsed_us ").map(|us| us * 1e3),
        };
        let failed = part(name).contains("failed: ");
        costs.insert(name.to_owned(), cost.filter(|_| !failed).ok_or_else(|| wrong(name))?);
    }
    Ok(Pass { costs, report })
}

/// Returns the nanoseconds for a MiB that has arrived.
fn iperf_cost(report: &Value) -> Option<f64> {
    let end = &report["end"];
    let received = if end["sum_received"].is_object() { &end["sum_received"] } else { &end["sum"] };
    let lost = received["lost_percent"].as_f64().unwrap_or(0.0);
    let rate = received["bits_per_second"].as_f64()?;
    // Older versions sum up for UDP what was sent.
    let arrived = if end["sum_received"].is_object() { rate } else { rate * (1.0 - lost / 100.0) };
    (arrived > 0.0).then(|| 8.0 * f64::from(1 << 20) / arrived * 1e9)
}

fn summarize(passes: &[(Column, Costs)], os: &Value) -> Vec<Measured> {
    let of = |column: Column, name: &str| -> Vec<f64> {
        passes
            .iter()
            .filter(|(of, _)| *of == column)
            .filter_map(|(_, costs)| costs.get(name).copied())
            .collect()
    };
    let operations = os["benchmarks"].as_array().into_iter().flatten();
    let operations = operations.filter_map(|one| Some((one["name"].as_str()?, &one["paper"])));
    let applications = APPLICATIONS.iter().map(|(name, ..)| (*name, &Value::Null));
    let measured = |(name, paper): (&str, &Value)| {
        let native = of(Column::NativeLinux, name);
        let median = stats::median(&native);
        let over = |column: Column| {
            let costs = of(column, name);
            (!costs.is_empty()).then(|| (column.name(), four(stats::median(&costs) / median)))
        };
        Measured {
            name: name.to_owned(),
            operation: operation(name),
            native_instructions: median,
            over_native: Column::COMPARED.into_iter().filter_map(over).collect(),
            noise: native.iter().map(|cost| (cost / median - 1.0).abs()).fold(0.0, f64::max),
            cluster_2007: paper_ratios(&paper["cluster_2007"]),
            jcst_2012: paper_ratios(&paper["jcst_2012_up"]),
        }
    };
    operations.chain(applications).map(measured).collect()
}

fn four(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

fn paper_ratios(row: &Value) -> BTreeMap<&'static str, f64> {
    let us = |column: Column| row[column.key()].as_f64();
    let ratio = |column: Column| Some((column.name(), four(us(column)? / us(Column::NativeLinux)?)));
    Column::COMPARED.into_iter().filter_map(ratio).collect()
}

fn operation(name: &str) -> &'static str {
    let own = APPLICATIONS.iter().find(|(own, ..)| *own == name).map(|(_, operation, ..)| *operation);
    own.unwrap_or_else(|| super::suite::operation(name))
}

/// Returns this part's section of the page.
#[must_use]
pub fn section(figures: &Papers) -> String {
    let is_operation = |one: &&Measured| !APPLICATIONS.iter().any(|(name, ..)| *name == one.name);
    let (operations, applications): (Vec<_>, Vec<_>) = figures.benchmarks.iter().partition(is_operation);
    format!(
        "{HEADING}\n\n\
        `cargo run -p mercury-lab-bench -- bench papers{}` writes this section alone. The machine is {}.\n\
        It counts instructions, and has Linux {}. Each column is the median of {}. The columns after N-L\n\
        are ratios to N-L. \"noise\" is the largest difference between a pass of N-L and their median. It\n\
        explains a ratio marked ~ as well as a cost would.\n\n\
        - **N-L**: Linux without Mercury.\n\
        - **M-N**: Mercury is loaded, in native mode.\n\
        - **M-V**: Mercury is attached.\n\
        - **X-U**: the same suite in a virtual machine of stock KVM. The papers' machine is one of Xen.\n\
        - **M-U**: the same virtual machine, with Mercury attached beneath KVM.\n\n\
        The papers' columns are CLUSTER 2007, table 1 (one Pentium 4), and JCST 2012, table 1 (one Xeon).\n\
        X-0, domain 0 of Xen, has no counterpart: the host of KVM is native. JCST's table 2 (two\n\
        processors) is not measured here.\n\n\
        The emulator counts the instructions of all levels: the virtual machine, KVM, QEMU beside it, and\n\
        Mercury. It shows how often a guest leaves, and the code that answers each exit. It does not show\n\
        nested page walks, TLB misses, and the processor's own work in VMRUN and an exit. On a\n\
        processor X-U and M-U are larger for that. Xen of the papers had no nested page tables. Its cost of\n\
        fork, mmap and page faults is code, and would be counted here.\n\n\
        {}\n\
        The applications are:\n\n\
        - PostgreSQL, with pgbench's reading transactions;\n\
        - dbench on ext4 on an NVMe disk, which the virtual machine has by virtio;\n\
        - a part of a kernel ({}), built in memory by the release's compiler;\n\
        - iperf3 by TCP and UDP, and ping, between two virtio network cards on one cable; one of them is\n  \
          in a network namespace.\n\n\
        The papers ran other versions, and state these results in words or bars. The last two columns are\n\
        the losses of domain U in their text. A loss of 20 % is a cost of 1 / 0.8 = 1.25. JCST says\n\
        \"more than\" of OSDB, ping and iPerf, and does not tell TCP from UDP.\n\n{}",
        if figures.is_quick { " --quick" } else { "" },
        figures.machine,
        figures.kernel,
        if figures.rounds == 1 { "one pass".to_owned() } else { format!("{} passes", figures.rounds) },
        operations_table(&operations),
        figures.part,
        applications_table(&applications),
    )
}

fn own_cells(one: &Measured) -> Vec<String> {
    let ratio = |column: Column| {
        let Some(ratio) = one.over_native.get(column.name()) else { return String::new() };
        let mark = if (ratio - 1.0).abs() < one.noise { " ~" } else { "" };
        format!("{ratio:.3}{mark}")
    };
    let mut row = vec![one.name.clone(), thousands(one.native_instructions.round() as u64)];
    row.extend(Column::COMPARED.map(ratio));
    row.push(format!("±{:.3}", one.noise));
    row
}

fn operations_table(operations: &[&Measured]) -> String {
    let columns = Column::COMPARED.map(Column::name);
    let mut header = vec!["instructions".to_owned(), Column::NativeLinux.name().to_owned()];
    header.extend(columns.map(str::to_owned));
    header.push("noise".to_owned());
    for paper in ["2007", "2012"] {
        header.extend(columns.map(|column| format!("{paper}: {column}")));
    }
    let row = |one: &&Measured| {
        let mut row = own_cells(one);
        for paper in [&one.cluster_2007, &one.jcst_2012] {
            row.extend(
                columns
                    .map(|column| paper.get(column).map_or_else(String::new, |ratio| format!("{ratio:.2}"))),
            );
        }
        row
    };
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    table(&header, &operations.iter().map(row).collect::<Vec<_>>())
}

fn applications_table(applications: &[&Measured]) -> String {
    let row = |one: &&Measured| {
        let mut row = own_cells(one);
        row.insert(1, one.operation.to_owned());
        let said = APPLICATIONS.iter().find(|(name, ..)| *name == one.name);
        row.extend(said.map_or(["", ""], |(_, _, cluster, jcst)| [*cluster, *jcst]).map(str::to_owned));
        row
    };
    let header =
        ["instructions", "per", "N-L", "M-N", "M-V", "X-U", "M-U", "noise", "2007: X-U", "2012: X-U"];
    table(&header, &applications.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const OS: &str = r#"{"benchmarks": [{"name": "fork", "us": {"median": 100.0}, "paper": {
        "cluster_2007": {"native_us": 93.0, "mercury_native_us": 113.0, "mercury_attached_us": 323.0,
                         "xen_domain_u_us": 311.0, "mercury_domain_u_us": 311.0},
        "jcst_2012_up": {"native_us": 98.0, "mercury_native_us": 114.0, "mercury_attached_us": 490.0,
                         "xen_domain_u_us": 470.0, "mercury_domain_u_us": 471.0}}}]}"#;

    fn said() -> String {
        let iperf = r#"{"end": {"sum_received": {"bits_per_second": 8388608.0}}}"#;
        let udp = r#"{"end": {"sum": {"bits_per_second": 16777216.0, "lost_percent": 50.0}}}"#;
        format!(
            "== os\n{OS}\n== postgres-read\ntps = 500.0 (without)\n== dbench-disk\n Operation\n -----\n \
             Close   1000  0.1 0.2\n\nThroughput\n== build-kernel\nelapsed_us 2000000\n\
             == iperf3-tcp\n{iperf}\n== iperf3-udp\n{udp}\n== ping\n\nelapsed_us 5000\n== end\n"
        )
    }

    #[test]
    fn a_pass_is_read_also_from_a_console() {
        for said in [said(), said().replace('\n', "\r\n")] {
            let Pass { costs, .. } = read(&said, &Plan::QUICK).unwrap();
            let all: Vec<(&str, f64)> = costs.iter().map(|(name, cost)| (name.as_str(), *cost)).collect();
            assert_eq!(
                all,
                [
                    ("build-kernel", 2e9),
                    ("dbench-disk", 1e6),
                    ("fork", 1e5),
                    ("iperf3-tcp", 1e9),
                    ("iperf3-udp", 1e9),
                    ("ping", 5e3),
                    ("postgres-read", 2e6),
                ]
            );
        }
    }

    #[test]
    fn a_benchmark_that_fails_is_an_error() {
        for (from, to) in
            [("elapsed_us 2000000", "make: ***"), ("tps = ", "failed: postgres-read "), ("8388608.0", "0.0")]
        {
            assert!(read(&said().replace(from, to), &Plan::QUICK).is_err(), "{to}");
        }
    }

    fn figures() -> Papers {
        let Pass { costs, report } = read(&said(), &Plan::QUICK).unwrap();
        let times =
            |factor: f64| costs.iter().map(|(name, cost)| (name.clone(), cost * factor)).collect::<Costs>();
        let columns = Column::HOST.into_iter().chain(Column::GUEST);
        let passes: Vec<_> =
            columns.zip([1.0, 1.0, 1.01, 1.5, 1.6]).map(|(column, by)| (column, times(by))).collect();
        Papers {
            is_quick: true,
            machine: "a machine".into(),
            kernel: "6.1".into(),
            rounds: 1,
            part: "kernel/time/".into(),
            benchmarks: summarize(&passes, &report),
        }
    }

    #[test]
    fn the_papers_columns_stand_beside_ours() {
        let figures = figures();
        let fork = &figures.benchmarks[0];
        assert_eq!(
            fork.over_native,
            BTreeMap::from([("M-N", 1.0), ("M-V", 1.01), ("X-U", 1.5), ("M-U", 1.6)])
        );
        assert_eq!((fork.cluster_2007["M-V"], fork.jcst_2012["M-U"]), (3.4731, 4.8061));
        let section = section(&figures);
        assert!(section.contains("| 2007: M-V ") && section.contains("| 2012: X-U"), "{section}");
        assert!(
            section.lines().any(|line| line.starts_with("| fork ") && line.contains("| 1.600 |")),
            "{section}"
        );
        assert!(section.contains("| dbench-disk "), "{section}");
    }

    /// A reader takes a ratio without a mark for a cost.
    #[test]
    fn a_ratio_within_the_noise_is_marked() {
        let mut figures = figures();
        let fork = |figures: &Papers| {
            let section = section(figures);
            section.lines().find(|line| line.starts_with("| fork ")).expect("a row").to_owned()
        };
        let row = fork(&figures);
        assert!(!row.contains('~'), "{row}");
        figures.benchmarks[0].noise = 0.55;
        let row = fork(&figures);
        for expected in ["| 1.000 ~ |", "| 1.010 ~ |", "| 1.500 ~ |", "| 1.600 |"] {
            assert!(row.replace("   |", " |").replace("  |", " |").contains(expected), "{row}");
        }
    }
}
