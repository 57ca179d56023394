/*
 * Firmware methods around a sleep, which report their calls to the kernel's log. `iasl -tc` compiles this file into
 * sleep.aml. The kernel prints the reports with acpi.aml_debug_output=1.
 */
DefinitionBlock ("sleep.aml", "SSDT", 2, "MERC", "SLEEP", 1)
{
    Method (\_TTS, 1, Serialized)
    {
        Debug = Concatenate ("firmware _TTS ", ToDecimalString (Arg0))
    }

    Method (\_PTS, 1, Serialized)
    {
        Debug = Concatenate ("firmware _PTS ", ToDecimalString (Arg0))
    }

    Method (\_WAK, 1, Serialized)
    {
        Debug = Concatenate ("firmware _WAK ", ToDecimalString (Arg0))
        Return (Package (2) { Zero, Zero })
    }
}
