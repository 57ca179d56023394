//! Rewritten texts through the real assembler and the verifier.
#![allow(clippy::unwrap_used, missing_docs)]

use std::{fs, process::Command};

use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use mercury_afterburner::{
    kind::Kind,
    prelude::prelude,
    record::{Flags, Record},
    rewrite::{self, Treatment},
    verify::{Account, check, image::Image, verify},
};
use proptest::prelude::*;

fn assemble(parts: &[&[u8]]) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let object = directory.path().join("a.o");
    let mut command = Command::new("as");
    command.arg("--64").arg("-o").arg(&object);
    for (number, part) in parts.iter().enumerate() {
        let path = directory.path().join(format!("{number}.s"));
        fs::write(&path, part).unwrap();
        command.arg(path);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(parts.last().unwrap()));
    fs::read(object).unwrap()
}

fn rewritten(text: &str, treatment: Treatment) -> Image {
    let insertions = rewrite::rewrite(text.as_bytes(), treatment);
    let text = rewrite::apply(text.as_bytes(), &insertions);
    Image::parse(&assemble(&[prelude(treatment).as_bytes(), &text])).unwrap()
}

fn slots(text: &str) -> Image {
    rewritten(&format!("f:\n{text}\n"), Treatment::Slots)
}

fn clean(image: &Image) -> Account {
    let account = check::account(image, "a.o");
    assert_eq!(account.findings, [], "{:?}", image.records);
    account
}

fn code<'a>(image: &'a Image, section: &str) -> &'a [u8] {
    &image.code.iter().find(|code| code.name == section).unwrap().bytes
}

fn kinds(image: &Image) -> Vec<Kind> {
    image.records.iter().map(|record| record.kind).collect()
}

/// Returns the length of each slot, once.
fn lengths(image: &Image) -> Vec<u8> {
    let mut records: Vec<&Record> = image.records.iter().collect();
    records.dedup_by_key(|record| record.slot);
    records.iter().map(|record| record.length).collect()
}

const FORMS: &[(&str, Kind)] = &[
    ("cli", Kind::Cli),
    ("CLI", Kind::Cli),
    ("pushfq", Kind::Pushf),
    ("popf", Kind::Popf),
    ("iretq", Kind::Iret),
    ("lretq", Kind::FarReturn),
    ("rex.W ljmp *8(%rsp)", Kind::FarJump),
    ("lgdt foo(%rip)", Kind::Lgdt),
    ("lidtq (%rax)", Kind::Lidt),
    ("sgdt -8(%rsp)", Kind::Sgdt),
    ("lldt %ax", Kind::Lldt),
    ("sldt %eax", Kind::Sldt),
    ("ltr %di", Kind::Ltr),
    ("str 2(%rdi)", Kind::Str),
    ("smsw %rax", Kind::Smsw),
    ("wbinvd", Kind::Wbinvd),
    ("wbnoinvd", Kind::Wbinvd),
    ("invlpg (%rdi)", Kind::Invlpg),
    ("invpcid (%rsp), %rax", Kind::Invpcid),
    ("rdmsr", Kind::Rdmsr),
    ("swapgs", Kind::Swapgs),
    ("cpuid", Kind::Cpuid),
    ("stac", Kind::Stac),
    ("xsetbv", Kind::Xsetbv),
    ("monitor %rax, %ecx, %edx", Kind::Monitor),
    ("mwait %eax, %ecx", Kind::Mwait),
    ("verw foo(%rip)", Kind::Verify),
    ("lar %cx, %eax", Kind::Lar),
    ("lsl %rax, %rax", Kind::Lsl),
    ("rdgsbase %r11", Kind::ReadBase),
    ("wrfsbase %rdi", Kind::WriteBase),
    ("xsaves64 (%rdi)", Kind::Xsaves),
    ("xrstors (%rdi)", Kind::Xrstors),
    ("movq %rax, %cr3", Kind::WriteControl),
    ("mov %cr4, %r10", Kind::ReadControl),
    ("movq %db7, %rax", Kind::ReadDebug),
    ("mov %rdx, %dr6", Kind::WriteDebug),
    ("movl %eax, %ss", Kind::LoadSegment),
    ("movw %dx, %fs", Kind::LoadSegment),
    ("movw %ds, 8(%rdi)", Kind::StoreSegment),
    ("pushq %fs", Kind::StoreSegment),
    ("pop %gs", Kind::LoadSegment),
    ("lss (%rax), %esp", Kind::LoadSegment),
    ("inb %dx, %al", Kind::In),
    ("inl %dx", Kind::In),
    ("inb $0x60", Kind::In),
    ("outw %dx", Kind::Out),
    ("outb $0x80", Kind::Out),
    ("in (%dx), %eax", Kind::In),
    ("outb %al, $0x80", Kind::Out),
    ("outl %eax, (%dx)", Kind::Out),
    ("rep insl", Kind::Ins),
    ("rep; outsw", Kind::Outs),
    ("sysretl", Kind::Sysret),
    ("vmmcall", Kind::Hypercall),
    ("vmrun %rax", Kind::Virtualize),
    (".byte 0x0f,0x01,0xca", Kind::Clac),
    (".byte 0x0f, 0x01, 0xee", Kind::Rdpkru),
    (".byte 0x48, 0x0f,0xc7,0x2f", Kind::Xsaves),
    (".byte 0xf3; wbinvd", Kind::Wbinvd),
    ("/* a; comment */ in %dx, %al", Kind::In),
];

#[test]
fn each_form_gets_a_slot() {
    for (form, kind) in FORMS {
        // There is nothing to borrow on either side.
        let image = slots(&format!("call g\n1: {form} # cli\n2: call g\n"));
        let account = clean(&image);
        assert_eq!((kinds(&image), account.sensitive, account.uncovered), (vec![*kind], 1, 0), "{form}");
        assert!(lengths(&image)[0] >= kind.least_slot(), "{form}");
        assert_eq!(image.records[0].offset, 0, "an exception table names the instruction: {form}");
    }
}

#[test]
fn each_form_gets_a_slot_where_a_macro_makes_it() {
    for (form, kind) in FORMS.iter().filter(|(form, _)| !form.contains(['/', ';'])) {
        let quoted = format!(".macro m op\n1: \\op\n.endm\nm \"{form}\"\ncall g");
        let image = slots(&quoted);
        // A prefix before a macro's name hides it from the assembler, and nothing in the kernel
        // does that.
        if !form.starts_with("rep") && !form.starts_with("rex") {
            clean(&image);
            assert_eq!(kinds(&image), [*kind], "{form}");
        }
    }
}

#[test]
fn registers_that_only_a_macro_knows() {
    let image = slots(".macro m reg:req\nmov %cr3, \\reg\nmov \\reg, %cr3\n.endm\nm %rax\nm reg=%r12");
    clean(&image);
    assert_eq!(kinds(&image).len(), 4);
}

#[test]
fn neighbours_are_borrowed_where_that_is_harmless() {
    for (text, bytes) in [
        ("cli; movl $1, %eax; call g", &[0xFA, 0xB8, 1, 0, 0, 0][..]),
        ("cli; call g", &[0xFA, 0xE8]),
        // The statement as the preprocessor leaves it.
        ("cli; movl foo (% rip), %eax; call g", &[0xFA, 0x8B, 0x05]),
        ("cli; testl %eax, %eax; je .Lx; .Lx: ret", &[0xFA, 0x85, 0xC0, 0x74]),
        ("pushf; pop %rax; jne .Lx; sti; .Lx: ret", &[0x9C, 0x58, 0x75, 1, 0xFB]),
        (
            "pushf; pop %rax\n#NO_APP\n.loc 1 1\n#APP\ncli\n popq %r12\n call g",
            &[0x9C, 0x58, 0xFA, 0x41, 0x5C],
        ),
        // Nothing can be borrowed after the instruction, but enough before it.
        ("movq %rax, %rbx; xorl %eax, %eax; sti; call *%rax", &[0x48, 0x89, 0xC3, 0x31, 0xC0, 0xFB]),
    ] {
        let image = slots(&format!(".file 1 \"x\"\n{text}"));
        let account = clean(&image);
        assert!(code(&image, ".text").starts_with(bytes), "{text}: {:x?}", code(&image, ".text"));
        assert_eq!((account.slots, account.without_nop), (1, 1), "{text}");
        assert!(image.records[0].flags.has(Flags::BORROWED), "{text}");
    }
}

#[test]
fn labels_and_calls_are_not_borrowed() {
    for text in [
        "cli\n1: movl $1, %eax\nret",
        "cli; call __fentry__",
        "cli; jmp __x86_return_thunk",
        "cli; jne g",
        "cli; jne f; 1: nop",
        "cli; jne .Lx; .Lx: ret",
        "cli; .p2align 4; movl $1, %eax",
        "1: cli; jmp *%rax",
        "movl $1, %eax; 1: cli; call *%rax",
    ] {
        let image = slots(text);
        assert_eq!(clean(&image).without_nop, 0, "{text}");
        assert!(code(&image, ".text").windows(5).any(|five| five == [0xFA, 0x0F, 0x1F, 0x40, 0]), "{text}");
    }
}

#[test]
fn inseparable_instructions_stay_together() {
    for (text, bytes) in [
        ("sti; hlt; call g", &[0xFB, 0xF4][..]),
        ("sti; .byte 0x0f, 0x01, 0xc9; call g", &[0xFB, 0x0F, 0x01, 0xC9]),
        ("sti\n\thlt\n1: call g", &[0xFB, 0xF4]),
        ("swapgs\nsysretq", &[0x0F, 0x01, 0xF8, 0x48, 0x0F, 0x07]),
        ("swapgs ; iretq", &[0x0F, 0x01, 0xF8, 0x48, 0xCF]),
        ("movl %eax, %ss\nmovq %rcx, %rsp\ncall g", &[0x8E, 0xD0, 0x48, 0x89, 0xCC]),
    ] {
        let image = slots(text);
        assert_eq!(clean(&image).slots, 1, "{text}");
        assert!(code(&image, ".text").starts_with(bytes), "{text}: {:x?}", code(&image, ".text"));
    }
}

/// A NOP would let an interrupt in before HLT. The slot therefore stays too short, and the verifier
/// finds that.
#[test]
fn a_shadow_is_rather_left_without_a_slot() {
    let image = slots("call g; sti; 1: hlt; call g");
    let account = check::account(&image, "a.o");
    assert_eq!(account.uncovered, 0);
    assert!(account.findings.iter().all(|finding| finding.what == "a slot is too short"), "{account:?}");
    assert!(code(&image, ".text").windows(2).any(|two| two == [0xFB, 0xF4]));
}

#[test]
fn padding_costs_nothing_where_it_is_not_executed() {
    for (text, fill) in [("iretq", 0x0F), ("cli; ret", 0xCC), ("cli; jmp .Lx; .Lx: nop", 0xCC)] {
        let image = slots(text);
        clean(&image);
        assert!(lengths(&image)[0] >= 5, "{text}");
        let bytes = code(&image, ".text");
        let at = Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE)
            .iter()
            .find(|one| one.mnemonic() == Mnemonic::Int3 || one.mnemonic() == Mnemonic::Nop)
            .unwrap();
        assert_eq!(bytes[at.ip() as usize], fill, "{text}");
    }
}

#[test]
fn replacements_are_flagged() {
    let macro_text = ".macro alt a, b\n.pushsection .altinstr_replacement, \"ax\"\n\\b\n.popsection\n.endm\n";
    let text = format!(
        "{macro_text}alt \"\", \"stac\"\nalt \"\", \".byte 0x0f,0x01,0xca\"\ncli; \
         call g\n.pushsection .altinstr_replacement, \"ax\"\nwrmsr\n.popsection"
    );
    let image = slots(&text);
    clean(&image);
    let flagged: Vec<(Kind, bool)> =
        image.records.iter().map(|record| (record.kind, record.flags.has(Flags::ALTERNATIVE))).collect();
    assert_eq!(flagged, [(Kind::Cli, false), (Kind::Stac, true), (Kind::Clac, true), (Kind::Wrmsr, true)]);
    assert_eq!(code(&image, ".altinstr_replacement")[..6], [0x0F, 0x01, 0xCB, 0x0F, 0x01, 0xCA]);
}

#[test]
fn code_that_is_copied_is_only_written_down() {
    let text = ".macro m op\n\\op\n.endm\nf: cli; movq %rax, %cr3; m \"wrmsr\"; m \"pushfq\"; hlt; ret\n";
    let image = rewritten(text, Treatment::Left);
    let account = clean(&image);
    assert_eq!((account.sensitive, account.left, account.slots, account.filled_bytes), (5, 5, 0, 0));
    assert_eq!(code(&image, ".text"), [0xFA, 0x0F, 0x22, 0xD8, 0x0F, 0x30, 0x9C, 0xF4, 0xC3]);
}

/// Data is written as bytes as well, and may contain anything.
#[test]
fn data_is_not_touched() {
    let data = ".byte 207\n.byte 0x0f, 0x01, 0xca\n.byte 0xfa\n";
    for text in [
        format!(".data\n{data}"),
        format!(".section .rodata\n{data}"),
        format!(".pushsection .init.data, \"aw\"\n{data}.popsection"),
        "f: .byte 0xfa\n.byte 207".to_owned(),
    ] {
        assert_eq!(rewrite::rewrite(text.as_bytes(), Treatment::Slots), [], "{text}");
    }
    assert_ne!(rewrite::rewrite(format!(".section .x, \"ax\"\n{data}").as_bytes(), Treatment::Slots), []);
}

#[test]
fn code_of_other_modes_is_only_written_down() {
    let image =
        slots("ret\n.code32\ng: cli\n movl %eax, %cr0\n lgdt (%eax)\n ljmp $8, $1f\n.code64\n1: cli; call f");
    let account = clean(&image);
    assert_eq!((account.sensitive, account.left, account.slots), (5, 4, 1));
    let image = slots("ret\n.code32\ncli");
    assert_eq!(kinds(&image), [Kind::Mode, Kind::Cli, Kind::Mode]);
    clean(&image);
}

/// The mode is the assembler's, and stays when the section changes. PVH's entry and EFI's way to
/// 32-bit firmware depend on that.
#[test]
fn a_mode_stays_in_all_sections() {
    let entry = "g: cli\n movl %eax, %cr0\n ljmp $8, $1f\n.code64\n1: cli; call f";
    let image =
        slots(&format!("ret\n.code32\n.text\n.section .head.text, \"ax\"\n{entry}\n.text\ncli; call f"));
    let account = clean(&image);
    assert_eq!((account.sensitive, account.left, account.slots), (5, 3, 2));
    // Sections are left and re-entered in any order.
    let image = slots(
        ".pushsection .head.text, \"ax\"\n.code32\ncli\n.popsection\nsti\n.code64\ncall f; hlt; call f",
    );
    let account = clean(&image);
    assert_eq!((account.sensitive, account.left, account.slots), (3, 2, 1));
}

/// Templates of trampolines lie among read-only data, and so do the targets of firmware's jumps.
#[test]
fn instructions_among_data_are_only_written_down_and_must_be_there() {
    let macro_text = ".macro m op\n\\op\n.endm\n";
    let image = slots(&format!(
        "cli; call g\n{macro_text}.pushsection .rodata\n.byte 0xfa\nt: push %rax; pushfq; popfq; \
         m \"rdmsr\"\n\
         .code32\nlret\n.code64\n.popsection\nm \"wrmsr\""
    ));
    let account = clean(&image);
    assert_eq!((account.sensitive, account.left, account.slots), (6, 4, 2));
    let rodata = &image.data.iter().find(|data| data.name == ".rodata").unwrap().bytes;
    assert_eq!(rodata[..], [0xFA, 0x50, 0x9C, 0x9D, 0x0F, 0x32, 0xCB]);
    for (bytes, size, kind, flags, expected) in [
        ("0x9c", 1, Kind::Pushf, Flags::LEFT, &[][..]),
        ("0x90", 1, Kind::Pushf, Flags::LEFT, &["no pushf is at its recorded address"]),
        ("0xfa", 1, Kind::Pushf, Flags::LEFT, &["cli is recorded as pushf"]),
        ("0x0f,0x32", 1, Kind::Rdmsr, Flags::LEFT, &["rdmsr: 2 bytes, not 1"]),
    ] {
        let text = format!("ret\n.section .rodata\nd: .byte {bytes}\n.text");
        assert_eq!(whats(&planted_at("d", &text, &[(0, size, 0, size, kind, flags.0)])), expected, "{bytes}");
    }
    let text = "ret\n.section .rodata\nd: cli; .byte 0x0f,0x1f,0x40,0\n.text";
    assert!(whats(&planted_at("d", text, &[WHOLE])).contains(&"a slot is not in code"));
}

/// Xen's prefix for instructions that it emulates is no instruction but its UD2. Where code may
/// jump to the rest of the prefix, the rest is what it looks like.
#[test]
fn xens_prefix_is_known_where_it_is_one() {
    let prefix = ".byte 0x0f, 0x0b, 0x78, 0x65, 0x6e";
    let account = clean(&slots(&format!("call g; {prefix}; cpuid; call g")));
    assert_eq!((account.sensitive, account.slots), (1, 1));
    for text in [
        format!("{prefix}; nop; ret"),
        ".byte 0x0f, 0x0b, 0x78, 0x65; g: .byte 0x6e, 0x0f, 0xa2; ret".to_owned(),
        ".byte 0x78, 0x65, 0x6e; ret".to_owned(),
    ] {
        assert!(whats(&planted(&text, &[])).contains(&"uncovered: outs"), "{text}");
    }
}

/// Accounts for a hand-made `f` with these bytes, and records of slots at offsets from it.
fn planted(code: &str, records: &[Planted]) -> Account {
    planted_at("f", code, records)
}

/// Does the same with offsets from another label.
fn planted_at(label: &str, code: &str, records: &[Planted]) -> Account {
    let mut text = format!(".file \"planted.c\"\n.text\n.type f, @function\nf: {code}\n.size f, . - f\n");
    text += ".section .debug_funcnames, \"\", @progbits\n";
    for (at, length, offset, size, kind, flags) in records {
        let kind = *kind as u8;
        text += &format!(
            ".quad {label} + {at}\n.byte {length}, {offset}, {size}, {kind}, {flags}, 255, 255, 1\n"
        );
    }
    check::account(&Image::parse(&assemble(&[text.as_bytes()])).unwrap(), "planted.o")
}

fn whats(account: &Account) -> Vec<&str> {
    account.findings.iter().map(|finding| finding.what.as_str()).collect()
}

/// A record: offset, length, offset in the slot, size, kind, flags.
type Planted = (u32, u8, u8, u8, Kind, u8);

const CLI: &str = "cli; .byte 0x0f,0x1f,0x40,0; ret";
const WHOLE: Planted = (0, 5, 0, 1, Kind::Cli, 0);

#[test]
fn planted_misses_are_found_with_file_and_function() {
    let account = planted("call g; .byte 0x0f; .byte 0x32; ret", &[]);
    assert_eq!((account.sensitive, account.uncovered), (1, 1));
    let finding = &account.findings[0];
    assert_eq!((finding.what.as_str(), finding.function.as_str()), ("uncovered: rdmsr", "f+0x5"));
    assert_eq!((finding.source.as_str(), finding.section.as_str()), ("planted.c", ".text"));
    for byte in ["0xfa", "0x0f,0x01,0xca", "0x0f,0x22,0xd8", "0x8e,0xd8", "0xec", "0x9d", "0x48,0xcf"] {
        assert_eq!(planted(&format!(".byte {byte}; ret"), &[]).uncovered, 1, "{byte}");
    }
    assert_eq!(planted("nop; ret", &[]).findings, []);
}

#[test]
fn planted_errors_in_records_are_found() {
    assert_eq!(whats(&planted(CLI, &[WHOLE])), [""; 0]);
    let cases: &[(&str, &str, &[Planted], &str)] = &[
        ("another kind", CLI, &[(0, 5, 0, 1, Kind::Sti, 0)], "cli is recorded as sti"),
        ("another length", CLI, &[(0, 5, 0, 2, Kind::Cli, 0)], "cli: 1 bytes, not 2"),
        ("nothing there", ".byte 0x0f,0x1f,0x40,0; nop; ret", &[WHOLE], "no cli is at its recorded address"),
        ("too short", CLI, &[(0, 1, 0, 1, Kind::Cli, 0)], "a slot is too short"),
        (
            "torn",
            "cli; movl $1, %eax; ret",
            &[(0, 5, 0, 1, Kind::Cli, 8)],
            "an instruction reaches out of a slot",
        ),
        ("two NOPs", "cli; nop; nopl (%rax); ret", &[WHOLE], "a slot has more than one NOP"),
        (
            "a call",
            "cli; call g; ret",
            &[(0, 6, 0, 1, Kind::Cli, 8)],
            "a slot has borrowed an instruction that cannot be moved",
        ),
        (
            "a branch",
            "cli; jne g; ret",
            &[(0, 7, 0, 1, Kind::Cli, 8)],
            "a slot depends on its place and is not flagged",
        ),
        (
            "unflagged",
            "cli; movl $1, %eax; ret",
            &[(0, 6, 0, 1, Kind::Cli, 0)],
            "a slot has borrowed and is not flagged",
        ),
        (
            "place",
            "cli; movl g(%rip), %eax; ret",
            &[(0, 7, 0, 1, Kind::Cli, 8)],
            "a slot depends on its place and is not flagged",
        ),
        (
            "entered",
            "cli; .byte 0x0f,0x1f,0x40,0; jmp f + 1",
            &[WHOLE],
            "a branch leads into the middle of a slot",
        ),
        (
            "a symbol",
            "cli; g: .byte 0x0f,0x1f,0x40,0; ret",
            &[WHOLE],
            "the symbol g is in the middle of a slot",
        ),
        (
            "a pointer",
            "cli; .byte 0x0f,0x1f,0x40,0; ret; .pushsection .rodata; .quad f + 1; .popsection",
            &[WHOLE],
            ".rela.rodata points into the middle of a slot",
        ),
        (
            "twice",
            "cli; movl %eax, %ebx; cli; nop; nop; nop; ret",
            &[(0, 5, 0, 1, Kind::Cli, 8), (3, 5, 0, 1, Kind::Cli, 8)],
            "two slots overlap",
        ),
    ];
    for (name, code, records, what) in cases {
        let account = planted(code, records);
        let what = what.replace(".rela.", ".");
        assert!(whats(&account).contains(&what.as_str()), "{name}: {:?}", whats(&account));
    }
}

/// One instruction lies within another, as in the mitigations.
#[test]
fn both_ways_through_the_same_bytes_are_seen() {
    let account = planted("test $0xcc, %bl; ret; .byte 0xb8; g: cli; .byte 0xa8, 0, 0xc3; nop; ret", &[]);
    assert_eq!(whats(&account), ["uncovered: cli"]);
}

#[test]
fn a_wrong_operand_is_found() {
    let text = "f: movq %rax, %cr3; nop; nop; ret\n.section .debug_funcnames, \"\", @progbits\n.quad f\n\
                .byte 5, 0, 3, 46, 0, 0x10, 0x24, 1\n";
    let account = check::account(&Image::parse(&assemble(&[text.as_bytes()])).unwrap(), "a.o");
    assert!(whats(&account).contains(&"mov-to-cr is recorded with rax, cr4"), "{account:?}");
}

#[test]
fn an_object_without_records_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let verified = |text: &[u8]| {
        let path = directory.path().join("a.ko");
        fs::write(&path, assemble(&[text])).unwrap();
        verify(&path)
    };
    let error = verified(b"f: cli; ret\n").unwrap_err().to_string();
    assert!(error.contains("not pre-virtualized"), "{error}");
    assert_eq!(verified(b"f: nop; ret\n").unwrap().findings, []);
    assert!(Image::parse(b"no kernel").unwrap_err().to_string().contains("no kernel"));
    let text = b"f: ret\n.section .debug_funcnames, \"\", @progbits\n.quad f, 0\n";
    assert!(Image::parse(&assemble(&[text])).unwrap_err().to_string().contains("does not hold records"));
}

/// Generates statements as compilers and programmers write them, with their labels.
fn statement() -> impl Strategy<Value = String> {
    let forms: Vec<&'static str> = FORMS.iter().map(|(form, _)| *form).collect();
    let ordinary = [
        "movq %rax, %rbx",
        "movl $1, %eax",
        "popq %rbx",
        "pushq %r12",
        "xorl %eax, %eax",
        "testb $2, %dh",
        "andl $512, %eax",
        "movq foo(%rip), %rdx",
        "leaq 8(%rsp), %rdi",
        "incl %gs:16",
        "sete %al",
        "shrq $9, %rax",
        "movl %r8d, 300(%rbx)",
        "cmpl $0, foo(,%rax,8)",
        "btl $9, %eax",
        "leave",
        "ret",
        "call foo",
        "jmp .Lend",
        "jne .Lend",
        "jmp *%rax",
        ".loc 1 2 3",
        ".cfi_undefined rip",
        "lock; incl (%rdi)",
        "rep; movsb",
        "nop",
        "ud2",
        ".p2align 3",
        "",
        "# cli",
        "/* sti; hlt */",
        ".ascii \"cli;\"",
        "jmp foo",
        "pause",
        "movabsq $1, %rax",
    ];
    let one = prop_oneof![prop::sample::select(forms), prop::sample::select(ordinary.to_vec())];
    (one, prop::option::weighted(0.2, Just(())), prop::bool::ANY).prop_map(|(text, label, line)| {
        let label = if label.is_some() { "7: " } else { "" };
        format!("{label}{text}{}", if line || text.contains('#') { "\n" } else { " ; " })
    })
}

/// Returns the instructions without fillings.
fn instructions(image: &Image) -> Vec<String> {
    let Some(code) = image.code.iter().find(|code| code.name == ".text") else { return Vec::new() };
    let decoder = Decoder::with_ip(64, &code.bytes, 0, DecoderOptions::NONE);
    let kept = decoder.into_iter().filter(|one| !matches!(one.mnemonic(), Mnemonic::Nop | Mnemonic::Int3));
    kept.map(|one| format!("{:?} {:?} {:?}", one.code(), one.op0_register(), one.op1_register())).collect()
}

/// Makes short and near branches equal.
fn comparable(all: Vec<String>) -> Vec<String> {
    all.into_iter().map(|one| one.replace("_rel8_64", "").replace("_rel32_64", "")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// The same instructions stay in the same order, and every sensitive one is accounted for.
    #[test]
    fn any_program_stays_what_it_is(statements in prop::collection::vec(statement(), 1..40)) {
        let body = statements.concat().replace(".ascii \"cli;\"", ".p2align 2");
        let text = format!(".file 1 \"x.c\"\n.cfi_startproc\nf: {body}\n.Lend: ret\n.cfi_endproc\n");
        // A waiting instruction after a labelled STI is refused, and has a test of its own.
        prop_assume!(!body.contains("hlt") && !body.contains("mwait"));
        let with_records = format!("{text}.section .debug_funcnames, \"\", @progbits\n");
        let plain = Image::parse(&assemble(&[with_records.as_bytes()])).unwrap();
        let image = rewritten(&with_records, Treatment::Slots);
        prop_assert_eq!(comparable(instructions(&plain)), comparable(instructions(&image)), "{}", text);
        let account = check::account(&image, "a.o");
        let mut others = account.findings.iter().filter(|finding| finding.what != "a slot is too short");
        prop_assert!(others.next().is_none(), "{:?}\n{}", account.findings, text);
    }

    /// Arbitrary input passes without a removed or changed byte.
    #[test]
    fn any_text_passes_unharmed(text: Vec<u8>) {
        let insertions = rewrite::rewrite(&text, Treatment::Slots);
        let mut rest = &rewrite::apply(&text, &insertions)[..];
        let mut done = 0;
        for insertion in &insertions {
            let (before, after) = rest.split_at(insertion.at - done);
            prop_assert_eq!(before, &text[done..insertion.at]);
            rest = after.strip_prefix(insertion.text.as_bytes()).unwrap();
            done = insertion.at;
        }
        prop_assert_eq!(rest, &text[done..]);
    }

    /// A text without sensitive instructions is not touched at all.
    #[test]
    fn text_without_them_is_left_alone(words in prop::collection::vec("[a-z%$(),. ;:#\"'\\n]{0,12}", 0..20)) {
        let text = words.concat();
        let names: Vec<&str> = Kind::ALL.iter().flat_map(|kind| kind.mnemonics()).copied().collect();
        let harmless = text.split(|letter: char| !letter.is_ascii_alphanumeric()).all(|word| {
            !names.contains(&word) && !["cs", "ds", "es", "fs", "gs", "ss"].contains(&word)
        });
        if harmless {
            prop_assert_eq!(rewrite::rewrite(text.as_bytes(), Treatment::Slots), []);
        }
    }
}
