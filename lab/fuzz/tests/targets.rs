//! A short run of each target with a fixed seed.

use mercury_fuzz::{
    TARGETS,
    run::{End, Watched, run},
};

#[test]
fn no_target_fails() {
    for target in &TARGETS {
        let report = run(target, 1, End::Inputs(500), &Watched::default());
        assert!(report.failed.is_none(), "{}: {:02x?}", target.name, report.failed);
        println!("{}: {} outcomes", target.name, report.outcomes);
    }
}

/// Inputs that failed once, each named after its target.
#[test]
fn old_findings_stay_fixed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/findings");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("findings").flatten() {
        let name = entry.file_name().into_string().expect("a name");
        let target = TARGETS.iter().find(|target| name.starts_with(&format!("{}-", target.name)));
        let target = target.unwrap_or_else(|| panic!("{name} names no target"));
        (target.run)(&std::fs::read(entry.path()).expect("a finding"));
        count += 1;
    }
    assert!(count > 0, "there are no findings in {folder}");
}

#[test]
fn names_are_unique() {
    for target in &TARGETS {
        assert_eq!(mercury_fuzz::target(target.name).map(|found| found.name), Some(target.name));
    }
}
