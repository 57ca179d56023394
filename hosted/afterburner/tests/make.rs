//! `afterburner make` with a makefile in place of a kernel's: everything that it links is accounted
//! for, and the status tells the result.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

/// A kernel of two functions and a module of one, which is installed without its records. `OTHER`
/// assembles one of the kernel's files.
const MAKEFILE: &str = "\
all: vmlinux drivers/a.ko install/a.ko
vmlinux: main.o other.o
\tld -static -e start -o $@ $^
main.o: main.c
\t$(CC) -O2 -ffreestanding -fno-pic -fcf-protection=none -c -o $@ $<
other.o: other.s
\t$(OTHER) -c -o $@ $<
drivers/a.mod.o: drivers/a.c
\t$(CC) -O2 -ffreestanding -fno-pic -fcf-protection=none -c -o $@ $<
drivers/a.ko: drivers/a.mod.o
\tld -r -o $@ $<
install/a.ko: drivers/a.ko
\tstrip --strip-debug -o $@ $<
broken:
\texit 3
";
const MAIN: &str =
    "void other(void); void start(void) { asm volatile(\"cli\"); other(); asm volatile(\"hlt\"); }\n";
const OTHER: &str = ".globl other\n.type other, @function\nother: rdmsr\nret\n.size other, . - other\n";
const MODULE: &str = "void a(void) { asm volatile(\"wrmsr\"); }\n";

fn make(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_afterburner"));
    let Output { status, stderr, .. } =
        command.arg("make").args(arguments).current_dir(directory).output().unwrap();
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

#[test]
fn a_build_with_a_miss_fails_with_file_and_function_until_it_is_mended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for name in ["drivers", "install"] {
        fs::create_dir(path.join(name)).unwrap();
    }
    for (name, text) in
        [("Makefile", MAKEFILE), ("main.c", MAIN), ("other.s", OTHER), ("drivers/a.c", MODULE)]
    {
        fs::write(path.join(name), text).unwrap();
    }
    // The kernel's own compiler for all files but one, which gcc assembles without the stand-in.
    let (status, said) = make(path, &["OTHER=gcc"]);
    assert_eq!(status, Some(1), "{said}");
    for part in
        ["vmlinux: 3 sensitive instructions, 1 uncovered", "rdmsr", "other (.text", "2 files, 4 sensitive"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("a.ko: "), "{said}");
    // Nothing is linked anew, and the finding remains.
    assert_eq!(make(path, &["OTHER=gcc"]).0, Some(1));
    fs::remove_file(path.join("other.o")).unwrap();
    let (status, said) = make(path, &["OTHER=$(CC)"]);
    assert_eq!(
        (status, said.contains("2 files, 4 sensitive instructions, 0 uncovered")),
        (Some(0), true),
        "{said}"
    );
    // A file without findings that has not changed is not read again; a module with a finding is.
    assert_eq!(make(path, &["OTHER=$(CC)"]), (Some(0), String::new()));
    fs::write(path.join("drivers/a.c"), MODULE.replace("a(void)", "b(void)")).unwrap();
    let (status, said) = make(path, &["OTHER=$(CC)"]);
    assert_eq!((status, said.contains("1 files, 1 sensitive")), (Some(0), true), "{said}");
    // make's own status is handed on.
    assert_eq!(make(path, &["broken"]).0, Some(2));
}
