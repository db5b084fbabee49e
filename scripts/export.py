from rl.commands.export_adapter import main

raise SystemExit(main())
