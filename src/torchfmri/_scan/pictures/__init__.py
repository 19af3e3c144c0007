"""Tables, figures and the viewer's page of a scan.

`Scan` inherits its drawing methods from here; drawing itself is done by `visualization`, the page
by `_viewer`. Nothing here measures or changes a value: what is shown is what `record` reads.
"""
