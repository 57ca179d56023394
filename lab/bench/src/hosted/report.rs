//! The hosted kernels' part of docs/benchmarks.md, and their headline figures in
//! docs/benchmarks.json.

use super::{BENCHMARKS, Hosted, Row, ways::Way, work};
use mercury_lab::markdown::table;

/// The heading of this part in its section of docs/benchmarks.md.
pub const HEADING: &str = "### Hosted";

/// The benchmarks' names among the headline figures.
const NAMES: &[(&str, &str)] = &[
    ("null-call", "null_syscall"),
    ("page-fault", "page_fault"),
    ("fork", "fork"),
    ("exec", "fork_exec"),
    ("pipe", "pipe"),
    (work::POSTGRES, "postgresql"),
    (work::BUILD, "build"),
];
/// The hosted ways, and the systems with which they are compared.
const HOSTED: [(Way, &str); 2] = [(Way::Hosted, "hosted"), (Way::HostedIsolated, "hosted_isolated")];
const LIKES: [(Way, &str); 3] =
    [(Way::Uml, "uml"), (Way::UmlSeccomp, "uml_seccomp"), (Way::Gvisor, "gvisor")];
/// The ways whose work is compared with native work.
const OVER_NATIVE: [(Way, &str); 2] =
    [(Way::Hosted, "over_native"), (Way::HostedIsolated, "isolated_over_native")];

/// Returns all keys that [`headlines`] may have.
#[must_use]
pub fn headline_keys() -> Vec<String> {
    keys().into_iter().map(|(key, _)| key).collect()
}

/// A function that computes a figure from a row.
type Figure = Box<dyn Fn(&Hosted) -> Option<f64>>;

fn keys() -> Vec<(String, Figure)> {
    let mut all: Vec<(String, Figure)> = Vec::new();
    for (hosted, prefix) in HOSTED {
        for (like, suffix) in LIKES {
            all.extend(NAMES.iter().map(|(name, short)| {
                let figure: Figure = Box::new(move |figures| faster(figures, name, hosted, like));
                (format!("{prefix}_{short}_vs_{suffix}"), figure)
            }));
        }
    }
    for (hosted, suffix) in OVER_NATIVE {
        for name in [work::POSTGRES, work::BUILD] {
            let figure: Figure = Box::new(move |figures| of(figures, name, hosted));
            all.push((format!("{name}_{suffix}"), figure));
        }
    }
    all
}

/// Returns, by key, the speed of a hosted kernel compared with each system like it, and the time of
/// its work compared with native work. Missing measurements are left out.
#[must_use]
pub fn headlines(figures: &Hosted) -> Vec<(String, f64)> {
    let rounded = |number: f64| (number * 100.0).round() / 100.0;
    keys().into_iter().filter_map(|(key, figure)| Some((key, rounded(figure(figures)?)))).collect()
}

fn of(figures: &Hosted, name: &str, way: Way) -> Option<f64> {
    figures.benchmarks.iter().find(|row| row.name == name)?.ways.get(way.key()).copied()
}

/// Returns how many times as fast a hosted kernel is as a system like it.
fn faster(figures: &Hosted, name: &str, hosted: Way, like: Way) -> Option<f64> {
    Some(of(figures, name, like)? / of(figures, name, hosted)?)
}

/// The aims in comparison with User Mode Linux by ptrace, without isolation: a minimum speed-up,
/// and the reason for a missed aim.
const AIMS: &[(&str, f64, &str)] = &[
    ("null-call", 100.0, ""),
    ("page-fault", 4.0, "a fault costs a signal and an mmap of the host"),
    ("exec", 3.0, "mapped pages return fault by fault"),
    ("pipe", 5.0, "each message is a\nswitch between processes of the host"),
];
/// The upper bound of a build's time, in times of a native build.
const BUILD_AT_MOST: f64 = 1.25;
const BUILD_MISSED: &str = "the compiler touches thousands of\npages for each file, \
                            and most first touches cost a signal and an mmap of the host";

fn aims(figures: &Hosted) -> String {
    let fast = AIMS.iter().map(|(name, least, why)| {
        let what = what(name);
        let measured = faster(figures, name, Way::Hosted, Way::Uml).unwrap_or(0.0);
        let isolated = faster(figures, name, Way::HostedIsolated, Way::Uml).unwrap_or(0.0);
        let said = format!("{measured:.1}, in processes {isolated:.1}");
        format!("- {what}: {least} × ({}).", verdict(measured >= *least, &said, why))
    });
    let slow = of(figures, work::BUILD, Way::Hosted).unwrap_or(f64::INFINITY);
    let build = verdict(slow <= BUILD_AT_MOST, &format!("{slow:.2}"), BUILD_MISSED);
    let call = of(figures, "null-call", Way::Hosted).unwrap_or(f64::INFINITY);
    let others =
        Way::ALL.into_iter().filter(|way| !way.is_ours()).filter_map(|way| of(figures, "null-call", way));
    let fastest = others.fold(f64::INFINITY, f64::min);
    let first = verdict(call < fastest, &format!("{call:.1}, the fastest of the others {fastest:.1}"), "");
    format!(
        "These are the aims without isolation, as multiples of UML's speed by ptrace.\n\n{}\n\n\
        A system call is to be faster than in all other systems ({first}). \
        A build is to take at most {BUILD_AT_MOST}\n\
        times as long as natively ({build}).\n",
        fast.collect::<Vec<_>>().join("\n")
    )
}

fn verdict(is_kept: bool, measured: &str, why: &str) -> String {
    match (is_kept, why) {
        (true, _) => format!("kept: {measured}"),
        (false, "") => format!("**missed**: {measured}"),
        (false, why) => format!("**missed**: {measured}; {why}"),
    }
}

fn what(name: &str) -> &'static str {
    BENCHMARKS.iter().find(|(one, _)| *one == name).map_or("", |(_, what)| what)
}

/// Returns this part of the section in docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Hosted) -> String {
    let ways: Vec<Way> = Way::ALL
        .into_iter()
        .filter(|way| figures.benchmarks.iter().any(|row| row.ways.contains_key(way.key())))
        .collect();
    let header: Vec<&str> = [""].into_iter().chain(ways.iter().map(|way| way.heading())).collect();
    let rows: Vec<Vec<String>> = figures.benchmarks.iter().map(|row| cells(row, &ways)).collect();
    let seccomp = figures.uml_seccomp.as_ref().map(|version| format!(", and {version} with seccomp"));
    let gvisor = figures.gvisor.as_ref().map(|version| format!("; in gVisor {version}"));
    let left_out: String = figures.left_out.iter().map(|what| format!("\nLeft out: {what}.\n")).collect();
    format!(
        "{HEADING}\n\n\
        `mercury hosted run` ([hosted.md](hosted.md)) compared with other ways to run programs, \
        on one processor of a\n\
        host with Linux {}:\n\n\
        - as native processes;\n\
        - in the small kernel: hosted, hosted with unpatched programs (`--no-rewrite`), \
        and hosted with programs in\n\
        processes of their own (`--isolation=process`);\n\
        - in User Mode Linux (UML), {} by ptrace{}{};\n\
        - in the same small kernel in an emulated machine.\n\n\
        The first rows are `mercury bench os` with Debian's C library, from the same files in memory, \
        medians of {}\n\
        rounds. The last rows are work from one read-only disk, with all writes in memory: \
        PostgreSQL with one client\n\
        of pgbench (TPC-B), and a build of `{}` of a small kernel by make and gcc, \
        medians of {} (emulated once). The\n\
        built objects are the same in all ways, bit by bit. Each round measures all ways side by side. \
        Times are this\n\
        host's; the others are ratios to the native ones.\n\n{}\n{}{left_out}",
        figures.host,
        figures.uml,
        seccomp.unwrap_or_default(),
        gvisor.unwrap_or_default(),
        figures.rounds,
        work::PART,
        figures.rounds_of_work,
        table(&header, &rows),
        aims(figures),
    )
}

fn cells(row: &Row, ways: &[Way]) -> Vec<String> {
    let cell = |way: &Way| match row.ways.get(way.key()) {
        None => "–".to_owned(),
        Some(us) if *way == Way::Native => time(*us),
        // The measuring program subtracts the cost of a pipe from that of a switch.
        Some(0.0) => "≈ 0".to_owned(),
        Some(ratio) => format!("{ratio:.1}"),
    };
    [what(&row.name).to_owned()].into_iter().chain(ways.iter().map(cell)).collect()
}

fn time(us: f64) -> String {
    match us {
        1e6.. => format!("{:.1} s", us / 1e6),
        10_000.0.. => format!("{:.1} ms", us / 1e3),
        _ => format!("{us:.2} µs"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{super::tests::figures, *};

    #[test]
    fn the_section_has_the_ways_that_were_measured_and_names_the_others() {
        let section = section(&figures());
        for part in
            ["| 1.50 µs ", "6.1.0-uml by ptrace, and 7.3.4 with seccomp", "UML (seccomp)", "Left out: gVisor"]
        {
            assert!(section.contains(part), "{part}: {section}");
        }
        assert!(!section.contains("| gVisor") && !section.contains("in gVisor"), "{section}");
    }

    #[test]
    fn aims_are_kept_or_missed_by_what_was_measured() {
        let text = aims(&figures());
        assert!(text.contains("100 × (kept: 150.0, in processes 30.0)"), "{text}");
        assert!(text.contains("natively (**missed**: 2.00; the compiler"), "{text}");
        let mut slow = figures();
        for row in &mut slow.benchmarks {
            row.ways.insert("hosted", 20.0);
        }
        let text = aims(&slow);
        assert!(text.contains("100 × (**missed**: 15.0, in processes 30.0)"), "{text}");
        assert!(text.contains("systems (**missed**: 20.0, the fastest of the others 20.0)"), "{text}");
    }

    #[test]
    fn figures_at_once_are_of_what_was_measured() {
        let all = headlines(&figures());
        let of = |key: &str| all.iter().find(|(one, _)| one == key).map(|(_, number)| *number);
        assert_eq!(of("hosted_null_syscall_vs_uml"), Some(150.0));
        assert_eq!(of("hosted_isolated_pipe_vs_uml"), Some(30.0));
        assert_eq!(of("hosted_fork_exec_vs_uml_seccomp"), Some(10.0));
        assert_eq!((of("build_over_native"), of("postgresql_isolated_over_native")), (Some(2.0), Some(10.0)));
        assert_eq!(of("hosted_page_fault_vs_gvisor"), None);
        assert!(headline_keys().contains(&"hosted_page_fault_vs_gvisor".to_owned()));
    }

    #[test]
    fn times_are_readable() {
        assert_eq!([time(0.254), time(20_500.0), time(15_240_000.0)], ["0.25 µs", "20.5 ms", "15.2 s"]);
    }
}
